#!/bin/sh
# Makes random credentials in ./secrets, once: a file that exists stays. `--kubectl NAMESPACE` makes them a Secret.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -s "secrets/$1" ] || random > "secrets/$1"; }

for name in postgres_password mlflow_admin_password mlflow_flask_key aws_access_key_id aws_secret_access_key; do
  keep "$name"
done
if [ ! -s secrets/s3_identities ]; then
  printf '{"identities": [{"name": "mlflow", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' \
    "$(cat secrets/aws_access_key_id)" "$(cat secrets/aws_secret_access_key)" > secrets/s3_identities
fi
# Containers read the files as other users; on this machine the folder keeps everyone else out.
chmod 0444 secrets/* && chmod 0700 secrets
if [ "${1:-}" = "--kubectl" ]; then
  kubectl create secret generic mlflow-credentials --namespace "${2:?a namespace}" --from-file=secrets
fi
