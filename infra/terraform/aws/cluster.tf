resource "aws_iam_role" "cluster" {
  name               = "${var.name}-cluster"
  assume_role_policy = data.aws_iam_policy_document.assume["eks"].json
}

resource "aws_iam_role" "node" {
  name               = "${var.name}-node"
  assume_role_policy = data.aws_iam_policy_document.assume["ec2"].json
}

data "aws_iam_policy_document" "assume" {
  for_each = toset(["eks", "ec2"])

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["${each.key}.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset(["AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly"])

  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/${each.key}"
}

resource "aws_kms_key" "secrets" {
  description         = "Secrets of the cluster ${var.name}"
  enable_key_rotation = true
}

resource "aws_eks_cluster" "this" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn

  enabled_cluster_log_types = ["api", "audit", "authenticator"]

  access_config {
    authentication_mode = "API"
    # Whoever applies this becomes an administrator of the cluster; `admins` adds others.
    bootstrap_cluster_creator_admin_permissions = true
  }

  encryption_config {
    resources = ["secrets"]

    provider {
      key_arn = aws_kms_key.secrets.arn
    }
  }

  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.admin_cidrs) > 0
    public_access_cidrs     = length(var.admin_cidrs) > 0 ? var.admin_cidrs : null
  }

  depends_on = [aws_iam_role_policy_attachment.cluster]
}

resource "aws_eks_access_entry" "admin" {
  for_each = toset(var.admins)

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.key
}

resource "aws_eks_access_policy_association" "admin" {
  for_each = aws_eks_access_entry.admin

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value.principal_arn
  policy_arn    = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"

  access_scope {
    type = "cluster"
  }
}

locals {
  # Settings of each add-on; the others have none.
  addons = {
    # Network policies are enforced only when the network plug-in is told to.
    vpc-cni                = { enableNetworkPolicy = "true" }
    coredns                = {}
    kube-proxy             = {}
    eks-pod-identity-agent = {}
    # EKS has no default storage class of its own: a volume claim that names none, as Redis's, would wait for ever.
    aws-ebs-csi-driver = { defaultStorageClass = { enabled = true } }
  }
}

resource "aws_eks_addon" "this" {
  for_each = local.addons

  cluster_name         = aws_eks_cluster.this.name
  addon_name           = each.key
  configuration_values = length(each.value) > 0 ? jsonencode(each.value) : null
  # EKS begins with a network plug-in, a DNS and a proxy of its own, whose settings are taken over.
  resolve_conflicts_on_create = "OVERWRITE"

  dynamic "pod_identity_association" {
    for_each = each.key == "aws-ebs-csi-driver" ? [aws_iam_role.disks.arn] : []

    content {
      role_arn        = pod_identity_association.value
      service_account = "ebs-csi-controller-sa"
    }
  }

  depends_on = [aws_eks_node_group.head]
}

# The driver that makes disks for volume claims.
resource "aws_iam_role" "disks" {
  name               = "${var.name}-disks"
  assume_role_policy = data.aws_iam_policy_document.pods.json
}

resource "aws_iam_role_policy_attachment" "disks" {
  role       = aws_iam_role.disks.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonEBSCSIDriverPolicy"
}
