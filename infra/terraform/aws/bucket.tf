resource "aws_s3_bucket" "runs" {
  bucket_prefix = "${var.name}-runs-"
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket = aws_s3_bucket.runs.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

# Old commits are deleted by the run itself; what is left of broken uploads costs money and is seen nowhere.
resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    id     = "broken-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
}

# The pods of one service account reach the bucket; there is no key to leak.
resource "aws_iam_role" "trainer" {
  name               = "${var.name}-trainer"
  assume_role_policy = data.aws_iam_policy_document.pods.json
}

data "aws_iam_policy_document" "pods" {
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]

    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "runs" {
  statement {
    actions   = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.runs.arn]
  }

  statement {
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.runs.arn}/*"]
  }
}

resource "aws_iam_role_policy" "runs" {
  name   = "runs"
  role   = aws_iam_role.trainer.id
  policy = data.aws_iam_policy_document.runs.json
}

resource "aws_eks_pod_identity_association" "trainer" {
  cluster_name    = aws_eks_cluster.this.name
  namespace       = split(":", var.service_account)[0]
  service_account = split(":", var.service_account)[1]
  role_arn        = aws_iam_role.trainer.arn
}
