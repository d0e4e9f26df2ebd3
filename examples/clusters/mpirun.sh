#!/usr/bin/env bash
# On one host, for all of them: HOSTS=host-0:4,host-1:4 examples/clusters/mpirun.sh train.py --epochs 3
# The script calls gradientflow.init_from_mpi() instead of torch.distributed.init_process_group().
set -euo pipefail
: "${HOSTS:?hosts and how many processes on each, such as host-0:4,host-1:4}"
exec mpirun --host "$HOSTS" --bind-to none \
  -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  ${INTERFACE:+--mca btl_tcp_if_include "$INTERFACE" -x GLOO_SOCKET_IFNAME="$INTERFACE"} \
  ${MPI_OPTIONS:-} \
  "${PYTHON:-python}" "$@"
