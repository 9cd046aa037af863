variable "name" {
  description = "Name of the cluster, and the beginning of every other name."
  type        = string
  default     = "training"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "The name is a DNS label of 2 to 31 characters."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-west-2"
}

variable "kubernetes_version" {
  description = "EKS version."
  type        = string
  default     = "1.33"
}

variable "admin_cidrs" {
  description = "Networks that may reach the cluster's API, such as an office's. None: only from inside the VPC."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.admin_cidrs, "0.0.0.0/0")
    error_message = "The API is not opened to the whole internet."
  }
}

variable "admins" {
  description = "ARNs of other IAM roles or users that administer the cluster; whoever applies this does already."
  type        = list(string)
  default     = []
}

variable "head_types" {
  description = "Instance types for heads, Redis and operators. A head requests 1.1 CPUs and 9 GiB: three fit on an r6i.xlarge."
  type        = list(string)
  default     = ["r6i.xlarge"]
}

variable "worker_types" {
  description = "Instance types that will do for spot workers; several make reclaims rarer."
  type        = list(string)
  default     = ["g6.2xlarge", "g5.2xlarge"]
}

variable "worker_ami" {
  description = "EKS image of the workers; AL2023_x86_64_STANDARD for workers without GPUs."
  type        = string
  default     = "AL2023_x86_64_NVIDIA"
}

variable "spot_max" {
  description = "Most spot workers."
  type        = number
  default     = 8
}

variable "on_demand_max" {
  description = "Most on-demand workers; they are used by jobs rendered with --on-demand."
  type        = number
  default     = 0
}

variable "service_account" {
  description = "namespace:name of the service account whose pods may use the bucket."
  type        = string
  default     = "training:trainer"

  validation {
    condition     = length(split(":", var.service_account)) == 2
    error_message = "The service account is namespace:name."
  }
}

variable "notices" {
  description = "Whether pods on workers may ask the node's metadata, as jobs with resources.notices do; its credentials stand there too."
  type        = bool
  default     = false
}
