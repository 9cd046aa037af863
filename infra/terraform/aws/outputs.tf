output "runs" {
  description = "For cluster render kuberay --runs."
  value       = "s3://${aws_s3_bucket.runs.bucket}/runs"
}

output "kubeconfig" {
  description = "The command that lets kubectl in."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.this.name}"
}

output "autoscaler" {
  description = "The command that installs the cluster autoscaler."
  value = join(" ", [
    "helm install cluster-autoscaler cluster-autoscaler --repo https://kubernetes.github.io/autoscaler",
    "--namespace kube-system --set rbac.serviceAccount.name=cluster-autoscaler",
    "--set awsRegion=${var.region} --set autoDiscovery.clusterName=${aws_eks_cluster.this.name}",
  ])
}
