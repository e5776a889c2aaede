#!/usr/bin/env bash
#SBATCH --job-name=specdec --ntasks-per-node=1
#SBATCH --requeue --open-mode=append --signal=B:USR1@60
#
# Starts the engine. On first use it sets up .venv beside this file, which takes a minute or two; later starts are instant.
#
#   ./launch.sh [GROUP=CHOICE] [KEY=VALUE] ...             on this machine; what `python -m cluster.launch` takes
#   sbatch --nodes=2 ... launch.sh [KEY=VALUE] ...         on the nodes of a Slurm job (docs/slurm.md)
#   ./launch.sh --dry-run [KEY=VALUE] ...                  print what would be run
#   ./launch.sh --test [pytest arguments]                  the tests
#
# SPECDEC_PYTHON=python3.12       the interpreter to build .venv with; default: the first of 3.11 or newer
# SPECDEC_CONSTRAINTS=other.txt   other exact versions than constraints.txt, for example a CUDA build of PyTorch
# SPECDEC_VENV=/path/to/env       an environment of your own that has the packages, in place of .venv
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -n ${SLURM_JOB_ID:-} && ! -f $root/pyproject.toml ]]; then
    # Slurm runs a copy of this file and knows where the original lies.
    root=$(scontrol show job "$SLURM_JOB_ID" | sed -n '0,/Command=/s|^ *Command=\(.*\)/launch\.sh.*|\1|p' | head -n 1)
fi
venv=${SPECDEC_VENV:-$root/.venv}
constraints=$(realpath "${SPECDEC_CONSTRAINTS:-$root/constraints.txt}")

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${SPECDEC_PYTHON:-python3 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "${SPECDEC_PYTHON:-python3}: Python 3.11 or newer is needed; install it or name one with SPECDEC_PYTHON=/path/to/python3"
}

# What .venv was made of, and where: a change of either makes it again.
wanted_stamp() {
    echo "$root $(cat "$root/pyproject.toml" "$constraints" | cksum)"
}

is_ready() {
    [[ -n ${SPECDEC_VENV:-} ]] && return
    [[ -x $venv/bin/python && -f $venv/stamp && $(<"$venv/stamp") == "$(wanted_stamp)" ]]
}

install() {
    local python
    python=$(find_python)
    "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -c "$constraints" -e "$root[test]" >"$venv/setup.log" 2>&1 &
    local pid=$! started=$SECONDS
    trap "kill $pid 2>/dev/null" EXIT
    while kill -0 "$pid" 2>/dev/null; do
        [[ -t 2 ]] && printf '\rsetting up %s (once) ... %d s ' "$venv" $((SECONDS - started)) >&2
        sleep 0.2
    done
    trap - EXIT
    [[ -t 2 ]] && echo >&2
    if ! wait "$pid"; then
        tail -n 15 "$venv/setup.log" >&2
        fail "$venv: set-up failed; the whole log is $venv/setup.log"
    fi
    wanted_stamp >"$venv/stamp"
}

setup() {
    is_ready && return
    [[ -t 2 ]] || echo "setting up $venv (once)" >&2
    # Two first starts at a time must not write into each other's environment.
    (
        if command -v flock >/dev/null; then flock 9; fi
        is_ready || install
    ) 9>"$root/.venv.lock"
}

# Inside a job: in its batch script or the shell that `salloc` opens on its first node (a step with a number of its own),
# but not inside any other step; a `cluster=` of the user's own decides otherwise.
is_slurm_job() {
    [[ " $* " == *" cluster=slurm "* ]] && return
    [[ -n ${SLURM_JOB_ID:-} && ${SLURM_STEP_ID:-4294967290} == 4294967290 && " $* " != *" cluster="* ]]
}

run_tests() {
    cd "$root"
    exec "$venv/bin/python" -P -m pytest "$@"
}

[[ -n ${SPECDEC_VENV:-} ]] && export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# -P: a folder named `conf` or `cluster` where the user happens to stand must not be imported.
command=("$venv/bin/python" -P -m)
if [[ ${1:-} == --test ]]; then
    setup
    run_tests "${@:2}"
elif is_slurm_job "$@"; then
    setup
    export PATH=$venv/bin:$PATH  # for `ray`
    exec "${command[@]}" cluster.slurm.job "$@"  # which gets Slurm's signals in place of this shell
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
