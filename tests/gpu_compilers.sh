#!/usr/bin/env bash
# What tests/test_gpu_compile.py needs: XLA's GPU compiler for the JAX of an environment, and, where a later Python is
# found, a second environment with the newest JAX and its compiler. No card, no CUDA.
#
#     tests/gpu_compilers.sh .venv       makes .venv/gpu-compiler, .venv/newest and .venv/newest/gpu-compiler
#
# All of it is optional, so a failure is a line of text: the tests that miss it are skipped.
set -uo pipefail
venv=$1
log=$venv/gpu-compilers.log
: >"$log"

# The compiler in a folder of its own: in the environment, the plugin would look for a card at every start of JAX.
compiler_of() { # environment
    local folder=$1/gpu-compiler jaxlib
    jaxlib=$("$1/bin/python" -c 'from importlib.metadata import version; print(version("jaxlib"))') || return
    [ -d "$folder/jax_cuda13_plugin-$jaxlib.dist-info" ] && return
    rm -rf "$folder"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$folder" \
        "jax-cuda13-plugin==$jaxlib" "jax-cuda13-pjrt==$jaxlib" nvidia-cuda-nvcc \
        || { rm -rf "$folder"; return 1; }
}

# JAX 0.11 left Python 3.11 behind, so the newest JAX may need a later Python than the environment has.
later_python() {
    local candidate
    for candidate in python3.13 "$HOME"/.pyenv/versions/3.13*/bin/python python3.14 "$HOME"/.pyenv/versions/3.14*/bin/python; do
        "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 13))' 2>/dev/null && echo "$candidate" && return
    done
    return 1
}

newest() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || return 0
    local python
    python=$(later_python) || { echo "no Python 3.13"; return 1; }
    "$python" -m venv "$venv/newest" \
        && "$venv/newest/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade jax --editable . \
        && compiler_of "$venv/newest" || { rm -rf "$venv/newest"; return 1; }
}

# Both at once: most of the time goes into unpacking.
newest >>"$log" 2>&1 &
compiler_of "$venv" >>"$log" 2>&1 || echo "No GPU compiler for the installed JAX (see $log): its compile tests will be skipped."
wait $! || echo "No environment with the newest JAX (see $log): its GPU compile tests will be skipped."
exit 0
