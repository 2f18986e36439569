#!/bin/bash
# Start a real Slurm (Debian packages slurm-wlm, munge, slurmdbd, mariadb-server) with two slurmd on one machine.
# Usage: up.sh FOLDER. It needs root: each slurmd has a network namespace (tlc1, tlc2), and eight pretended GPUs.
# The processes are listed in FOLDER/pids; end those, and nothing by name.
set -euo pipefail
base=$1; mode=${2:-plain}
mkdir -p "$base"/{state,spool-tlc1,spool-tlc2,run,log}
if [[ ! -S $base/run/munge.socket ]]; then
    install -d -o munge -g munge -m 0755 "$base/run/munge"
    [[ -f $base/munge.key ]] || { dd if=/dev/urandom of="$base/munge.key" bs=1024 count=1 2>/dev/null; }
    chown root:root "$base/munge.key"; chmod 600 "$base/munge.key"
    mkdir -p /run/munge; chown root:root /run/munge; chmod 755 /run/munge
    munged --foreground --force --key-file="$base/munge.key" --socket=/run/munge/munge.socket.2 \
        --pid-file="$base/run/munged.pid" --log-file="$base/log/munged.log" --seed-file="$base/run/munge.seed" >"$base/log/munged.out" 2>&1 &
    echo $! >>"$base/pids"
fi
# Two "machines": network and UTS namespaces tlc1, tlc2 on a bridge; the controller and login node is this machine.
if ! ip link show br-tlc >/dev/null 2>&1; then
    ip link add br-tlc type bridge; ip addr add 10.77.0.254/24 dev br-tlc; ip link set br-tlc up
    for i in 1 2; do
        ip netns add tlc$i
        ip link add tlcv$i type veth peer name eth0 netns tlc$i
        ip link set tlcv$i master br-tlc up
        ip -n tlc$i link set lo up; ip -n tlc$i addr add 10.77.0.$i/24 dev eth0; ip -n tlc$i link set eth0 up
        mkdir -p /etc/netns/tlc$i
        printf '127.0.0.1 localhost\n10.77.0.1 tlc1\n10.77.0.2 tlc2\n10.77.0.254 %s\n' "$(hostname)" >/etc/netns/tlc$i/hosts
    done
fi
host=$(hostname)
cat >"$base/slurm.conf" <<C
ClusterName=probe
SlurmctldHost=$host(10.77.0.254)
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16817
SlurmctldPidFile=$base/run/slurmctld.pid
SlurmdPidFile=$base/run/slurmd-%n.pid
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool-%n
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=${KILLWAIT:-30}
MinJobAge=3600
JobRequeue=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
AccountingStorageType=${ACCOUNTING:-accounting_storage/slurmdbd}
AccountingStorageHost=10.77.0.254
AccountingStoragePort=16819
AccountingStorageTRES=gres/gpu
ProctrackType=$([[ $mode == cgroup ]] && echo proctrack/cgroup || echo proctrack/linuxproc)
TaskPlugin=$([[ $mode == cgroup ]] && echo task/cgroup || echo task/none)
PreemptType=preempt/partition_prio
PreemptMode=${PREEMPT:-REQUEUE}
NodeName=tlc1 NodeHostname=tlc1 NodeAddr=10.77.0.1 CPUs=8 RealMemory=12000 Gres=gpu:8
NodeName=tlc2 NodeHostname=tlc2 NodeAddr=10.77.0.2 CPUs=8 RealMemory=12000 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=${PREEMPT:-REQUEUE} GraceTime=${GRACE:-0}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
C
mkdir -p "$base/fakegpu"; for i in 0 1 2 3 4 5 6 7; do [[ -e $base/fakegpu/nvidia$i ]] || mknod "$base/fakegpu/nvidia$i" c 1 3; done
echo "NodeName=tlc[1-2] Name=gpu File=$base/fakegpu/nvidia[0-7]" >"$base/gres.conf"
cat >"$base/cgroup.conf" <<C
CgroupMountpoint=${CGROUP_MOUNT:-/sys/fs/cgroup}
CgroupPlugin=${CGROUP_PLUGIN:-cgroup/v1}
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainCores=no
ConstrainDevices=no
AllowedRAMSpace=100
C
export SLURM_CONF=$base/slurm.conf
if [[ ${ACCOUNTING:-accounting_storage/slurmdbd} == *slurmdbd ]]; then
    if [[ ! -d $base/mysql/mysql ]]; then
        mkdir -p "$base/mysql"; chown mysql: "$base/mysql"
        mariadb-install-db --no-defaults --user=mysql --datadir="$base/mysql" --auth-root-authentication-method=normal >"$base/log/mysql-install.out" 2>&1
    fi
    mariadbd --no-defaults --user=mysql --datadir="$base/mysql" --socket="$base/mysql/s.sock" --port=13306 --bind-address=127.0.0.1 \
        --pid-file="$base/mysql/m.pid" --innodb-buffer-pool-size=64M >"$base/log/mysql.out" 2>&1 & echo $! >>"$base/pids"
    for i in $(seq 60); do mariadb-admin --no-defaults --socket="$base/mysql/s.sock" ping >/dev/null 2>&1 && break; sleep 1; done
    mariadb --no-defaults --socket="$base/mysql/s.sock" -e "create database if not exists slurm_acct_db; create user if not exists slurm@'%' identified by 'x'; create user if not exists slurm@localhost identified by 'x'; grant all on slurm_acct_db.* to slurm@'%'; grant all on slurm_acct_db.* to slurm@localhost;"
    cat >"$base/slurmdbd.conf" <<C
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
DbdHost=localhost
DbdAddr=10.77.0.254
DbdPort=16819
SlurmUser=root
LogFile=$base/log/slurmdbd.log
PidFile=$base/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct_db
C
    chmod 600 "$base/slurmdbd.conf"
    slurmdbd -D >"$base/log/slurmdbd.out" 2>&1 & echo $! >>"$base/pids"
    sleep 6
fi
sleep 1
slurmctld -D >"$base/log/slurmctld.out" 2>&1 & echo $! >>"$base/pids"
sleep 2
for n in tlc1 tlc2; do ip netns exec $n unshare --uts bash -c "hostname $n; exec slurmd -D -N $n" >"$base/log/slurmd-$n.out" 2>&1 & echo $! >>"$base/pids"; done
sleep 3
sinfo -N -l
