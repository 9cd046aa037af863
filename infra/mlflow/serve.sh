#!/bin/sh
# Starts MLflow with basic authentication. Every credential is a file in the folder $SECRETS: none is an argument,
# so none shows in the list of processes, and none is in the image.
set -eu
: "${SECRETS:?the folder of credential files}"
of() { cat "$SECRETS/$1"; }

AWS_ACCESS_KEY_ID=$(of aws_access_key_id)
AWS_SECRET_ACCESS_KEY=$(of aws_secret_access_key)
MLFLOW_FLASK_SERVER_SECRET_KEY=$(of mlflow_flask_key)
database="postgresql://mlflow:$(of postgres_password)@${POSTGRES_HOST:-postgres}:5432/mlflow"
MLFLOW_BACKEND_STORE_URI=$database
MLFLOW_ARTIFACTS_DESTINATION=s3://mlflow/artifacts
MLFLOW_AUTH_CONFIG_PATH=/tmp/auth.ini
export AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_BACKEND_STORE_URI
export MLFLOW_ARTIFACTS_DESTINATION MLFLOW_AUTH_CONFIG_PATH

umask 077
cat > "$MLFLOW_AUTH_CONFIG_PATH" <<EOF
[mlflow]
default_permission = READ
database_uri = $database
admin_username = admin
admin_password = $(of mlflow_admin_password)
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
EOF

python - <<'EOF'
import os, boto3
store = boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
if "mlflow" not in [bucket["Name"] for bucket in store.list_buckets()["Buckets"]]:
    store.create_bucket(Bucket="mlflow")
EOF

exec mlflow server --host 0.0.0.0 --port 5000 --workers 1 --app-name basic-auth --serve-artifacts
