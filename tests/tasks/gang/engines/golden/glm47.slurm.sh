#!/bin/bash
#SBATCH --job-name=glm47-train-0123456789abcdef
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=h100
#SBATCH --time=2-00:00:00
#SBATCH --signal=TERM@89
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --export=AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY,AWS_SESSION_TOKEN,AWS_PROFILE,AWS_DEFAULT_REGION,AWS_ENDPOINT_URL
#SBATCH --chdir=/shared/finetune
#SBATCH --output=/shared/runs/work/train-0123456789abcdef/logs/slurm-%j.log
#SBATCH --open-mode=append

# A member ends when its standard input closes: this one has no writer and stays open while srun lives.
held=$(mktemp -u) && mkfifo -m 600 "$held" && exec 0<>"$held" && rm "$held"
export PYTHONUNBUFFERED=1
exec srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --export=ALL --label \
    bash -c 'GANG_HOST="$SLURMD_NODENAME" exec /opt/bin/python -m tasks.run.guard --grace=29 /opt/bin/python -m tasks.gang.member --store s3://bucket/finetune --gang train-0123456789abcdef --attempt 1 --node "$SLURM_NODEID"'
