#!/bin/sh
# Turns an empty clone into a working .venv: a uv that works, a real Python 3.12, then the packages of uv.lock.
#
#     make setup                  what everyone runs; it comes back here when pyproject.toml or uv.lock changed
#     EXTRA=gpu sh setup.sh       the same by hand (cpu when EXTRA is unset)
#
# Needs a uv, or any Python from 3.8 on that has venv or pip to fetch one with. PIP_* and UV_* settings of the caller
# hold. PYTHON_DIRS names the folders searched for interpreters besides PATH and pyenv.
set -eu
cd "$(dirname "$0")"
EXTRA=${EXTRA:-cpu}
PYTHON_DIRS=${PYTHON_DIRS-/usr/local/bin /usr/bin /opt/*/bin}
unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT # the Makefile runs .venv, whatever the caller has activated

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# Every executable called $1 that may be the wanted one, one a line, PATH first. All of PATH, because a pyenv shim that
# fails hides the ones behind it; and what a shim stands for lies in the versions/ beside it. CI containers often set a
# HOME other than the account's, where pyenv is.
candidates() {
    {
        printf '%s\n' "$PATH" | tr : '\n' | while IFS= read -r dir; do
            ls -d "$dir/$1" || true
            case $dir in */shims) ls -d "${dir%shims}"versions/*/bin/"$1" || true ;; esac
        done
        for root in "${PYENV_ROOT:-${HOME:-}/.pyenv}" "$(getent passwd "$(id -u)" | cut -d : -f 6)/.pyenv"; do
            ls -d "$root"/versions/*/bin/"$1" || true
        done
        for dir in $PYTHON_DIRS; do ls -d "$dir/$1" || true; done
    } 2>/dev/null
}

# The first line of standard input for which the command "$@" answers; prints the answer.
first() {
    while IFS= read -r candidate; do
        if answer=$("$@" "$candidate" </dev/null 2>/dev/null); then echo "$answer"; return 0; fi
    done
    return 1
}

# Both ask the interpreter where it lies: the answer is never a shim.
python_312() { "$1" -c 'import sys; print(sys.executable); sys.exit(sys.version_info[:2] != (3, 12))'; }
python_with_pip() {
    "$1" -c 'import sys, importlib.util as util
print(sys.executable)
sys.exit(sys.version_info < (3, 8) or not (util.find_spec("ensurepip") or util.find_spec("pip")))'
}

# Reading the settings is enough for uv to refuse when it is older than pyproject.toml's required-version.
working_uv() { "$1" python dir >&2 && echo "$1"; }
find_uv() { { echo "$PWD/.uv/bin/uv"; candidates uv; echo "${HOME:-}/.local/bin/uv"; } | first working_uv; }

fetch_uv() {
    host=$({ echo "$python"; candidates python3; } | first python_with_pip) ||
        fail "no uv, and no Python 3.8 or newer with venv or pip to fetch it: sudo apt-get install python3-venv"
    say "no working uv here: fetching one into .uv with $host"
    rm -rf .uv
    if "$host" -m venv .uv >/dev/null 2>&1; then
        .uv/bin/python -m pip install --quiet uv || fail "pip could not fetch uv (its reason stands above)"
    else # Debian without python3-venv
        rm -rf .uv
        "$host" -m pip install --quiet --target .uv uv ||
            fail "$host can fetch uv neither with venv nor with pip: sudo apt-get install python3-venv"
    fi
}

start=$(date +%s)
say "looks for uv and Python 3.12"
# A line every 10 s as long as this shell lives. The pause holds no output open after that.
while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "$(($(date +%s) - start)) s"; done &
clock=$!
trap 'kill "$clock" 2>/dev/null || true' EXIT
python=$(candidates python3.12 | first python_312) || python=
uv=$(find_uv) || {
    fetch_uv
    uv=$(find_uv) || fail "the uv that pip fetched does not run here, or is older than pyproject.toml asks for"
}
say "$("$uv" --version) ($uv)"

if [ -z "$python" ]; then
    say "no Python 3.12 here: uv fetches one"
    "$uv" python install --no-bin 3.12 || # says nothing of its reason under --quiet
        fail "uv could not fetch Python 3.12 (its reason stands above): make setup PYTHON_DIRS=/folder/of/a/python3.12"
    python=$("$uv" python find --managed-python 3.12)
fi
say "$("$python" --version) ($python)"

say "packages of uv.lock with extra $EXTRA (8 GB: under a minute from uv's cache, else as long as the download takes)"
"$uv" sync --quiet --frozen --extra "$EXTRA" --python "$python" || fail "uv sync failed (its reason stands above)"
# A training process imports some 2,400 modules, serving and Prefect's server as many. Compiled once here, in half a
# minute, they are there in 4 s at every start, also where PYTHONDONTWRITEBYTECODE keeps a process from storing them
# itself. Only a saving: a failure is none of setup's.
say "byte code"
storing=
store_byte_code() {
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c "$1" >/dev/null 2>&1 &
    storing="$storing $!"
}
store_byte_code 'import torch.distributed.run; from trainer.rehearsal import forked_ranks; forked_ranks.import_all()'
store_byte_code 'from pathlib import Path; from trainer.serving import engine; engine.prepare(Path(), False); from lm_eval import evaluator, tasks
from lm_eval.models import vllm_causallms; from vllm import LLM; from vllm.entrypoints.openai import api_server; from vllm.v1.worker import cpu_worker, gpu_worker'
store_byte_code 'import flows.finetune, prefect.server.api.server, prefect.cli.root, tasks.tracking.mlflow_sink, boto3
import mlflow.server, mlflow.store.tracking.sqlalchemy_store, mlflow.store.model_registry.sqlalchemy_store'
wait $storing || true
say "done in $(($(date +%s) - start)) s"
