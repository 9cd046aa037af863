# One hop: pods do not reach the node's own credentials. Two: they hear of a spot machine's end, and reach both.
resource "aws_launch_template" "node" {
  for_each = { head = 1, worker = var.notices ? 2 : 1 }

  name_prefix = "${var.name}-${each.key}-"

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_size = 200
      volume_type = "gp3"
      encrypted   = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = each.value
  }
}

# Heads, Redis, MLflow and operators: what must not be taken away. They have one zone, because a disk such as Redis's
# cannot leave its zone: a node in another one would be of no use to it.
resource "aws_eks_node_group" "head" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "head"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [aws_subnet.private[local.zones[0]].id]
  capacity_type   = "ON_DEMAND"
  instance_types  = var.head_types
  ami_type        = "AL2023_x86_64_STANDARD"

  scaling_config {
    min_size     = 1
    desired_size = 2
    max_size     = 3
  }

  launch_template {
    id      = aws_launch_template.node["head"].id
    version = aws_launch_template.node["head"].latest_version
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}

# A group for each zone: a gang's traffic between zones is slow and is paid for.
resource "aws_eks_node_group" "spot" {
  for_each = aws_subnet.private

  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "spot-${each.key}"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [each.value.id]
  capacity_type   = "SPOT"
  instance_types  = var.worker_types
  ami_type        = var.worker_ami

  scaling_config {
    min_size     = 0
    desired_size = 0
    max_size     = var.spot_max
  }

  taint {
    key    = "training-orchestrator/spot"
    value  = "true"
    effect = "NO_SCHEDULE"
  }

  launch_template {
    id      = aws_launch_template.node["worker"].id
    version = aws_launch_template.node["worker"].latest_version
  }

  lifecycle {
    # The cluster autoscaler moves it.
    ignore_changes = [scaling_config[0].desired_size]
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}

resource "aws_eks_node_group" "on_demand" {
  count = var.on_demand_max > 0 ? 1 : 0

  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "on-demand"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [aws_subnet.private[local.zones[0]].id]
  capacity_type   = "ON_DEMAND"
  instance_types  = var.worker_types
  ami_type        = var.worker_ami

  scaling_config {
    min_size     = 0
    desired_size = 0
    max_size     = var.on_demand_max
  }

  launch_template {
    id      = aws_launch_template.node["worker"].id
    version = aws_launch_template.node["worker"].latest_version
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size]
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}
