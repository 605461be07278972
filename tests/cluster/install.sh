#!/usr/bin/env bash
# Installs the Debian packages that the tests of clusters need, as root; no service of them is started.
set -euo pipefail
skip() { echo "tests of clusters: skipped $1"; exit 1; }

[ "$(id -u)" = 0 ] || skip "all: they need root, for namespaces"
missing=()
for program in slurmctld slurmd srun sshd rsync ip; do
    command -v "$program" > /dev/null || missing+=("$program")
done
[ ${#missing[@]} != 0 ] || exit 0
command -v apt-get > /dev/null || skip "those with ${missing[*]}: not installed, and there is no apt-get"

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then  # it forbids that a package starts its service
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
{ timeout 120 apt-get -q update && timeout 240 apt-get -q install -y --no-install-recommends \
    slurmctld slurmd slurm-client openssh-server openssh-client rsync iproute2; } > /dev/null 2>&1 ||
    skip "those with ${missing[*]}: not installed, and apt does not answer"
