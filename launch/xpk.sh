#!/bin/bash
# Trains on a TPU pod slice of a GKE cluster by xpk, one process per host; JAX finds the others by itself.
# Run: pip install xpk, gcloud auth login, then: bash launch/xpk.sh
# Logs: the link that xpk prints. End: xpk workload delete --cluster=CLUSTER --workload=jaxshard
set -eu

project=my-project                                           # CHANGE
zone=us-central1-a                                           # CHANGE
cluster=my-cluster                                           # CHANGE: of `xpk cluster create`
image=us-docker.pkg.dev/my-project/my-images/jaxshard:latest # CHANGE: holds jaxshard[train,tpu] and configs/ in /app
storage=shared                                               # CHANGE: of `xpk storage attach`, mounted at /shared

# `exec`, so that SIGTERM reaches the trainer through xpk's wrapper.
command="cd /app && exec jaxshard train configs/gpt2_124m.toml --data /shared/text --out /shared/runs/gpt2"
command="$command --resume-if-saved --train.hang-seconds 900"

# One slice: jax.make_mesh refuses devices of several. xpk restarts after 127 to 255 unasked, thus after 143 (saved
# after SIGTERM) and 134 (another process was lost); 75 is a hang.
xpk workload create \
  --project="$project" --zone="$zone" --cluster="$cluster" --workload=jaxshard \
  --tpu-type=v5litepod-32 --num-slices=1 \
  --docker-image="$image" --storage="$storage" --env=PYTHONUNBUFFERED=1 \
  --max-restarts=50 --restart-on-exit-codes=75 --termination-grace-period-seconds=300 \
  --command="$command"
