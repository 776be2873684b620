#!/bin/bash
# A private two-node Slurm on this machine, for tests: real daemons, two virtual nodes, no systemd. Needs root.
#
#   slurm/test_cluster.sh start FOLDER    set it up in FOLDER; then use it with SLURM_CONF=FOLDER/slurm.conf
#   slurm/test_cluster.sh stop FOLDER     end its daemons, by pid
#
# Missing Debian packages are installed. Exit status 77: this machine cannot have it, and the last line says why.
set -euo pipefail

PACKAGES=(slurmctld slurmd slurm-client munge)
CPUS_PER_NODE=16      # more than the machine may have: tasks of tests mostly wait
MEMORY_PER_NODE=16000 # MiB
READY_WITHIN=30       # seconds

cannot() { echo "no Slurm here: $*"; exit 77; }

provide_packages() {
    command -v slurmctld slurmd munged srun >/dev/null && return
    [[ $EUID -eq 0 ]] || cannot "slurmctld, slurmd, munged or srun is missing and only root may install them"
    command -v apt-get >/dev/null || cannot "slurmctld, slurmd, munged or srun is missing and there is no apt-get"
    export DEBIAN_FRONTEND=noninteractive
    local install=(apt-get install -y -q --no-install-recommends "${PACKAGES[@]}")
    "${install[@]}" >"$FOLDER/apt.log" 2>&1 && return
    { apt-get update -q && "${install[@]}"; } >>"$FOLDER/apt.log" 2>&1 ||
        cannot "apt-get install ${PACKAGES[*]} failed: $(tail -n 1 "$FOLDER/apt.log")"
}

port_is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# The first of three free neighbouring ports, from one that depends on this process.
choose_ports() {
    local port=$((12000 + $$ % 2000 * 4))
    while port_is_taken $port || port_is_taken $((port + 1)) || port_is_taken $((port + 2)); do
        port=$((port + 4))
    done
    echo $port
}

write_configuration() {
    local port host
    port=$(choose_ports)
    host=$(hostname -s)
    cat >"$FOLDER/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2
SlurmdParameters=config_overrides
SwitchType=switch/none
JobRequeue=1
KillWait=5
MinJobAge=3600
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.%n.pid
SlurmdSpoolDir=$FOLDER/spool.%n
StateSaveLocation=$FOLDER/state
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd.%n.log
NodeName=node[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=$CPUS_PER_NODE RealMemory=$MEMORY_PER_NODE State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
}

start_munge() {
    mkdir -p "$FOLDER/munge"
    chmod 711 "$FOLDER/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$FOLDER/munge/key")
    munged --force --socket="$FOLDER/munge/socket" --key-file="$FOLDER/munge/key" \
        --pid-file="$FOLDER/munged.pid" --seed-file="$FOLDER/munge/seed" --log-file="$FOLDER/munged.log"
}

wait_until_ready() {
    local deadline=$((SECONDS + READY_WITHIN))
    while ((SECONDS < deadline)); do
        [[ $(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | wc -l) -eq 2 ]] && return
        sleep 0.2
    done
    tail -n 20 "$FOLDER"/*.log >&2
    return 1
}

start() {
    mkdir -p "$FOLDER"
    provide_packages
    [[ $EUID -eq 0 ]] || cannot "its daemons run as root, and this is user $(id -un)"
    trap 'stop' ERR
    mkdir -p "$FOLDER"/{state,spool.node1,spool.node2}
    write_configuration
    start_munge
    slurmctld -c
    slurmd -N node1
    slurmd -N node2
    wait_until_ready
    sinfo --Node --long
}

# The pid files are the daemons' own. Wait until they are gone, so that FOLDER can be removed.
stop() {
    local file pid
    for file in "$FOLDER"/slurmd.*.pid "$FOLDER"/slurmctld.pid "$FOLDER"/munged.pid; do
        [[ -s $file ]] || continue
        pid=$(<"$file")
        kill "$pid" 2>/dev/null || continue
        for ((i = 0; i < 100; i++)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null || true
        rm -f "$file"
    done
}

if [[ $# -ne 2 || ($1 != start && $1 != stop) ]]; then
    echo "usage: $0 start|stop FOLDER" >&2
    exit 2
fi
PATH=$PATH:/usr/sbin
FOLDER=$(realpath -m "$2")
export SLURM_CONF=$FOLDER/slurm.conf
"$1"
