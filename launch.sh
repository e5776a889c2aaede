#!/usr/bin/env bash
#SBATCH --job-name=specdec --ntasks-per-node=1
#SBATCH --requeue --open-mode=append --signal=B:USR1@60
#
# Starts the engine. The first start makes .venv beside this file, which takes a minute or two.
#
#   ./launch.sh [GROUP=CHOICE] [KEY=VALUE] ...             on this machine; arguments of `python -m cluster.launch`
#   sbatch --nodes=2 ... launch.sh [KEY=VALUE] ...         on the nodes of a Slurm job (docs/slurm.md)
#   ./launch.sh --dry-run [KEY=VALUE] ...                  print the commands only
#   ./launch.sh --test [pytest arguments]                  the tests
#
# SPECDEC_PYTHON=python3.12       the interpreter to build .venv with; default: the first of 3.11 or newer
# SPECDEC_CONSTRAINTS=other.txt   exact versions in place of constraints.txt, for example a CUDA build of PyTorch
# SPECDEC_VENV=/path/to/env       an environment of your own that has the packages, in place of .venv
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -n ${SLURM_JOB_ID:-} && ! -f $root/pyproject.toml ]]; then
    # Slurm runs a copy of this file; the job has the path of the original.
    root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/Command=/s|^ *Command=\(.*\)/launch\.sh.*|\1|p' | head -n 1)
fi
venv=${SPECDEC_VENV:-$root/.venv}
constraints=$(realpath "${SPECDEC_CONSTRAINTS:-$root/constraints.txt}")

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [[ -n ${SPECDEC_PYTHON:-} ]] && candidates=("$SPECDEC_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "${SPECDEC_PYTHON:-python3}: Python 3.11 or newer is needed; install it or name one with SPECDEC_PYTHON=/path/to/python3"
}

# The inputs of .venv and its place: if they change, it is made again.
wanted_stamp() {
    echo "$root $(cat "$root/pyproject.toml" "$constraints" | cksum)"
}

is_ready() {
    [[ -n ${SPECDEC_VENV:-} ]] && return
    [[ -x $venv/bin/python && -f $venv/stamp && $(<"$venv/stamp") == "$(wanted_stamp)" ]]
}

# Runs a command of the set-up beside the seconds since it began.
step() {
    "$@" >>"$venv/setup.log" 2>&1 &
    local pid=$!
    trap "kill $pid 2>/dev/null" EXIT
    while kill -0 "$pid" 2>/dev/null; do
        [[ -t 2 ]] && printf '\rsetting up %s (once) ... %d s ' "$venv" $((SECONDS - started)) >&2
        sleep 0.2
    done
    trap - EXIT
    wait "$pid" && return
    [[ -t 2 ]] && echo >&2
    tail -n 15 "$venv/setup.log" >&2
    fail "$venv: set-up failed; the whole log is $venv/setup.log"
}

install() {
    local python started=$SECONDS
    python=$(find_python)
    "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
    : >"$venv/setup.log"
    # --compile: bytecode, even where pip is configured to write none.
    step "$venv/bin/python" -m pip install --compile -c "$constraints" -e "$root[serve,test]"
    # The first import reads half a gigabyte from the disk, and writes the bytecode of this project.
    step env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -P -c "import actors.worker.factory, cluster.runtime.ray_backend"
    [[ -t 2 ]] && echo >&2
    wanted_stamp >"$venv/stamp"
}

setup() {
    is_ready && return
    [[ -t 2 ]] || echo "setting up $venv (once)" >&2
    # Two simultaneous first starts must not write into the same environment.
    (
        if command -v flock >/dev/null; then flock 9; fi
        is_ready || install
    ) 9>"$root/.venv.lock"
}

# True in the batch script of a job, or in the shell that `salloc` opens on its first node (step 4294967290), but in no
# other step; an explicit `cluster=` takes precedence.
is_slurm_job() {
    [[ " $* " == *" cluster=slurm "* ]] && return
    [[ -n ${SLURM_JOB_ID:-} && ${SLURM_STEP_ID:-4294967290} == 4294967290 && " $* " != *" cluster="* ]]
}

run_tests() {
    cd "$root"
    unset PYTHONDONTWRITEBYTECODE  # the tests start a hundred processes; each would compile the project again
    exec "$venv/bin/python" -P -m pytest "$@"
}

[[ -n ${SPECDEC_VENV:-} ]] && export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# -P: do not import a folder named `conf` or `cluster` of the current directory.
command=("$venv/bin/python" -P -m)
if [[ ${1:-} == --test ]]; then
    setup
    run_tests "${@:2}"
elif is_slurm_job "$@"; then
    setup
    export PATH=$venv/bin:$PATH  # for `ray`
    exec "${command[@]}" cluster.slurm.job "$@"  # exec: Slurm's signals go to it
elif [[ " $* " == *" --dry-run "* ]]; then
    for word in "$@"; do
        [[ $word == --dry-run ]] || overrides+=("$word")
    done
    printf -v line '%q ' "${command[@]}" cluster.launch ${overrides[@]+"${overrides[@]}"}
    echo "${line% }"
else
    setup
    exec "${command[@]}" cluster.launch "$@"
fi
