output "runs" {
  description = "For cluster render kuberay --runs."
  value       = "s3://${aws_s3_bucket.runs.bucket}/runs"
}

output "kubeconfig" {
  description = "The command that lets kubectl in."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.this.name}"
}
