# The configuration files of slurm/lab, which sources this file and has set LAB, N, GPUS, DBD, NETNS, NET, PORT,
# CLUSTER, NODE_TIMEOUT, SLURM_CONF, USER_NAME. Checked with SLURM 22.05.

gpu_files() { # the files of fake GPUs; character devices, or CUDA_VISIBLE_DEVICES stays empty
  local last=$((GPUS - 1))
  if [ ! -c "/dev/tty$last" ]; then
    mkdir "$LAB/gpu"
    for i in $(seq 0 "$last"); do mknod "$LAB/gpu/tty$i" c 1 3 || die "cannot make fake GPUs; use GPUS=0"; done
    echo "$LAB/gpu/tty[0-$last]"
  else
    echo "/dev/tty[0-$last]"
  fi
}

configure() {
  local version ctl address nodes gres="" i half=$(((N + 1) / 2)) preempt="SlurmctldParameters=preempt_send_user_signal"
  version=$(slurmctld -V | grep -o '[0-9]*\.[0-9]*' | head -1)
  mkdir "$LAB"/{etc,state,spool,log,munge}
  for i in $(seq "$N"); do mkdir "$LAB/spool/n$i"; done
  ctl="ctl($NET.1)" address="$NET.1"
  [ "$NETNS" = 1 ] || ctl="$(hostname -s)(127.0.0.1)" address=127.0.0.1
  [ "$GPUS" = 0 ] || {
    gres="Gres=gpu:v100:$GPUS"
    echo "NodeName=n[1-$N] Name=gpu Type=v100 File=$(gpu_files)" >"$LAB/etc/gres.conf"
  }
  # Nothing here uses cgroups, but slurmd looks for some, and finds none on the /sys of a namespace.
  case $version in
    2[0-2].* | 23.02) echo "CgroupPlugin=cgroup/v1" >"$LAB/etc/cgroup.conf" ;;
    *) echo "CgroupPlugin=disabled" >"$LAB/etc/cgroup.conf"; preempt="PreemptParameters=send_user_signal" ;;
  esac
  nodes=$(for i in $(seq "$N"); do
    if [ "$NETNS" = 1 ]; then place="NodeAddr=$NET.$((10 + i))"
    else place="NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((PORT + 10 + i))"; fi
    echo "NodeName=n$i $place CPUs=96 Sockets=2 CoresPerSocket=24 ThreadsPerCore=2 RealMemory=512000 $gres" \
      "Feature=v100,rack$((i > half ? 2 : 1)) State=UNKNOWN"
  done)
  # Jobs start at once, a requeued job waits 5 s (cred_expire) and not 2 minutes, an ended one is known for a day.
  cat >"$SLURM_CONF" <<EOC
ClusterName=$CLUSTER
SlurmctldHost=$ctl
$([ "$NETNS" = 1 ] || echo "SlurmctldPort=$PORT")
SlurmUser=$USER_NAME
SlurmdUser=$USER_NAME
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/socket,cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmdPidFile=$LAB/slurmd-%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$preempt
PriorityType=priority/basic
Licenses=machine:1
$([ "$N" = 1 ] || echo "TopologyPlugin=topology/tree")
MpiDefault=none
$([ "$GPUS" = 0 ] || echo "GresTypes=gpu")
MailProg=/bin/true
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=$NODE_TIMEOUT
KillWait=3
MinJobAge=86400
$([ "$DBD" = 0 ] || printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd \
    "AccountingStorageHost=$address" "AccountingStoragePort=$((PORT + 1))" \
    "AccountingStoragePass=$LAB/munge/socket")
$nodes
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF State=UP
PartitionName=short Nodes=ALL MaxTime=2 PriorityTier=10 PreemptMode=REQUEUE GraceTime=30 State=UP
EOC
  # Two racks, each with a switch, so that records can say where their nodes hang.
  [ "$N" = 1 ] || printf '%s\n' "SwitchName=rack1 Nodes=n[1-$half]" "SwitchName=rack2 Nodes=n[$((half + 1))-$N]" \
    "SwitchName=core Switches=rack[1-2]" >"$LAB/etc/topology.conf"
  printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$LAB/munge/socket" "DbdHost=${ctl%%(*}" "DbdAddr=$address" \
    "DbdPort=$((PORT + 1))" "SlurmUser=$USER_NAME" "PidFile=$LAB/slurmdbd.pid" "LogFile=$LAB/log/slurmdbd.log" \
    StorageType=accounting_storage/mysql StorageHost=localhost StorageUser=root StorageLoc=slurm_acct \
    >"$LAB/etc/slurmdbd.conf"
  chmod 600 "$LAB/etc/slurmdbd.conf"
}
