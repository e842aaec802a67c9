#!/bin/sh
# Starts the services of compose.yaml, or changes them after an edit or an upgrade. Missing secrets are made first.
#
#     sh deploy/compose/start.sh [OPTIONS of docker compose ...]      such as --profile gpu
#
# Containers run as other users, so files in secrets/ can be read by all; the folder keeps other users of this host out.
set -eu
cd "$(dirname "$0")"
mkdir -p -m 700 secrets
umask 333
secret() { [ -e "secrets/$1" ] || printf %s "$2" >"secrets/$1"; }
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
secret PGPASSWORD "$(random)"
secret AWS_ACCESS_KEY_ID "${AWS_ACCESS_KEY_ID:-finetune}"
secret AWS_SECRET_ACCESS_KEY "${AWS_SECRET_ACCESS_KEY:-$(random)}"
secret HF_TOKEN "${HF_TOKEN:-}"
umask 022
compose=$(docker compose version >/dev/null 2>&1 && echo docker compose || echo podman-compose)
if [ -z "${AWS_ENDPOINT_URL:-}" ] && ! grep -qs '^AWS_ENDPOINT_URL=' .env; then
    set -- --profile s3 "$@"
fi
exec $compose "$@" up --detach
