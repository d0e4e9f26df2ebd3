#!/usr/bin/env bash
# Start this on every host, with the same HEAD, and the training script behind it:
#
#   HEAD=host-0 NNODES=2 NPROC=4 examples/clusters/torchrun.sh train.py --epochs 3
#
# NNODES=1:2 goes on with one host if the other is lost, from the script's checkpoint; up to RESTARTS times.
# ADDRESS, this host's own, where names do not lead to addresses; HEAD is an address then too.
set -euo pipefail
: "${HEAD:?the host that all others can reach, where they meet}"
settings=${RDZV_CONF:-}
if [[ -n ${ADDRESS:-} ]]; then # torchrun would ask this host's name whether it is HEAD
  is_host=$([[ $ADDRESS == "$HEAD" ]] && echo 1 || echo 0)
  settings=is_host=$is_host${settings:+,$settings}
fi
exec torchrun \
  --nnodes "${NNODES:-2}" \
  --nproc-per-node "${NPROC:-1}" \
  --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d \
  --rdzv-id "${JOB:-gradientflow}" \
  --rdzv-endpoint "$HEAD:${PORT:-29400}" \
  ${settings:+--rdzv-conf "$settings"} \
  ${ADDRESS:+--local-addr "$ADDRESS"} \
  "$@"
