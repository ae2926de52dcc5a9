#!/usr/bin/env bash
# Installs what the notebooks need in Colab, or with --force on any Linux machine: the packages that are missing, and
# Transformer Engine (TE) where the GPU can use it (compute capability 8.0 or higher). It changes nothing that is
# installed: everything there is frozen as a constraint first, torch above all, since TE is built for one torch.
# If TE cannot be installed the workshop runs without it, and the last line says why.
set -euo pipefail
exec 2>&1 # the setup cell shows one stream

TE_VERSION=2.20.2 # what the notebooks were tested with
NEEDED="numpy pandas matplotlib tqdm safetensors ipywidgets"
usage="usage: bash colab_setup.sh [--force] [--dry-run] [--python PATH]
  --force    also outside Colab; tries a failed TE installation again
  --dry-run  say what would be done, change nothing
  --python   the Python to install for (in Colab: python3; else .venv, made by 'make lab')"

force=false dry_run=false python=
while [ $# -gt 0 ]; do
  case $1 in
  --force) force=true ;;
  --dry-run) dry_run=true ;;
  --python) shift && python=${1:-} && [ -n "$python" ] || { echo "colab_setup.sh: --python needs a path" && exit 2; } ;;
  -h | --help) echo "$usage" && exit 0 ;;
  *) echo "colab_setup.sh: unknown option '$1'; allowed: --force, --dry-run, --python PATH, --help" && exit 2 ;;
  esac
  shift
done

colab=false
if [ -n "${COLAB_RELEASE_TAG:-}" ] || [ -d /content/sample_data ]; then colab=true; fi
if ! $colab && ! $force && ! $dry_run; then
  echo "Not in Colab: nothing to do. On a CUDA machine of your own: bash colab_setup.sh --force"
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
started=$SECONDS
stop() { echo "colab_setup.sh: $1" && exit 1; }

if [ -z "$python" ]; then
  python=python3
  if ! $colab && [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
fi
command -v "$python" >/dev/null || stop "there is no Python '$python'; name one with --python PATH"

# ------------------------------------------------------------------------------------------- what is there

# Prints shell assignments. Reads metadata only: importing torch would take seconds. Parses on old Pythons too.
look='
import hashlib, os, re, shlex, shutil, sys
if sys.version_info < (3, 11):
    print("problem=" + shlex.quote("the workshop needs Python 3.11 or newer, and %s is %d.%d" % ((sys.executable,) + sys.version_info[:2])))
    sys.exit()
import importlib.util, sysconfig
from importlib.metadata import distributions
needed, te_version, script = sys.argv[1:4]
versions = {}
for found in distributions():
    name = re.sub(r"[-_.]+", "_", found.metadata["Name"] or "").lower()
    versions.setdefault(name, found.version)  # the first on sys.path is the one that is imported
names = ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu12", "transformer_engine_cu13")
te = {name: versions[name] for name in names if name in versions}
torch, cuda = versions.get("torch", ""), ""
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    try:
        text = open(os.path.join(os.path.dirname(spec.origin), "version.py")).read()
        cuda = (re.findall(r"^cuda\b[^=\n]*=\s*.(\d+\.\d+)", text, re.M) or [""])[0]
    except OSError:
        pass
core = "transformer_engine_cu" + cuda.split(".")[0]
whole = {"transformer_engine", "transformer_engine_torch", core} == set(te) and len(set(te.values())) == 1
if whole:  # older ones lack what the notebooks use
    whole = [int(n) for n in te["transformer_engine"].split(".")[:2]] >= [2, 9]
roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
if spec and spec.origin:
    roots.add(os.path.dirname(os.path.dirname(spec.origin)))
headers = sorted(
    os.path.join(base, "nvidia", entry, "include")
    for base in roots if os.path.isdir(os.path.join(base, "nvidia"))
    for entry in os.listdir(os.path.join(base, "nvidia"))
    if os.path.isdir(os.path.join(base, "nvidia", entry, "include"))
)
has = lambda name: any(os.path.exists(os.path.join(folder, name)) for folder in headers)
# torch brings the headers of its CUDA, cuDNN and NCCL, except two sets that have packages of their own.
lacking = [
    "%s==%s.*" % (cu12 if cuda.startswith("12.") else cu13, cuda)
    for header, cu12, cu13 in (
        ("crt/host_config.h", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-crt"),
        ("nv/target", "nvidia-cuda-cccl-cu12", "nvidia-cuda-cccl"),
    ) if not has(header)
]
try:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
except (ValueError, OSError):
    memory = 4
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
missing = [name for name in needed.split() if name not in versions]
gpus = []
for base, _, files in os.walk("/proc/driver/nvidia/gpus"):
    gpus += [line for name in files if name == "information" for line in open(os.path.join(base, name)) if "Model" in line]
state = repr((sys.executable, sys.version, torch, cuda, sorted(te.items()), missing, gpus, open(script).read()))
frozen = [
    "%s==%s" % pair for pair in sorted(versions.items())
    if pair[0] and not pair[0].startswith("transformer_engine") and re.fullmatch(r"[0-9][A-Za-z0-9.!+_-]*", pair[1] or "")
]
for key, value in {
    "py": "%d.%d.%d" % sys.version_info[:3], "torch": torch, "cuda": cuda, "missing": " ".join(missing),
    "te_found": ", ".join("%s %s" % pair for pair in te.items()), "te_whole": "true" if whole else "false",
    "headers": ":".join(headers), "has_runtime": "true" if has("cuda_runtime.h") else "false",
    "header_packages": " ".join(lacking), "cores": cores, "jobs": max(1, min(cores, int(memory // 4))),
    "free_gb": int(shutil.disk_usage(sysconfig.get_path("purelib")).free / 1e9),
    "state": hashlib.sha256(state.encode()).hexdigest(), "frozen": "\n".join(frozen), "problem": "",
}.items():
    print("%s=%s" % (key, shlex.quote(str(value))))
'
look() {
  found=$("$python" -c "$look" "$NEEDED" "$TE_VERSION" "${BASH_SOURCE[0]}") || stop "$python does not run: $found"
  eval "$found"
  [ -z "$problem" ] || stop "$problem; name another one with --python PATH"
}
py='' torch='' cuda='' missing='' te_found='' te_whole='' headers='' has_runtime='' header_packages='' cores='' jobs='' free_gb='' state='' frozen='' problem=''
look
[ -n "$torch" ] || stop "PyTorch is not installed for $python: run 'make lab' (or python3 tools/bootstrap.py setup) first"

# A run that ended is remembered with what was installed then: the next one has nothing to look for.
work=$root/artifacts/setup
if ! $dry_run && ! { mkdir -p "$work" 2>/dev/null && [ -w "$work" ]; }; then work=$(mktemp -d); fi
if ! $dry_run && [ "$(sed -n 1p "$work/stamp" 2>/dev/null)" = "$state" ]; then
  verdict=$(sed -n 2p "$work/stamp")
  if [ "$verdict" = ok ] || ! $force; then
    sed -n '3,$p' "$work/stamp"
    if [ "$verdict" = failed ]; then echo "(From the last run; 'bash colab_setup.sh --force' tries again.)"; fi
    exit 0
  fi
fi
finish() { # finish ok|none|failed LINE...: remember and say how it ended
  look
  { echo "$state" && printf '%s\n' "$@"; } >"$work/stamp.new" && mv "$work/stamp.new" "$work/stamp"
  shift
  echo "  took $((SECONDS - started)) s"
  printf '%s\n' "$@"
  exit 0
}

gpu='' capability=''
if command -v nvidia-smi >/dev/null; then
  line=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null | head -n 1 || true)
  case $line in [0-9]*.[0-9]*,*) capability=${line%%,*} gpu=${line#*, } ;; esac
fi

# ------------------------------------------------------------------------------------------- the plan

te_plan=none
if [ -z "$gpu" ]; then
  te_line="no CUDA GPU answers (nvidia-smi), so Transformer Engine is not installed"
elif [ "${capability%%.*}" -lt 8 ]; then
  te_line="Transformer Engine needs compute capability 8.0, this GPU has $capability: not installed"
elif [ -z "$cuda" ]; then
  te_line="torch $torch is a build without CUDA, so Transformer Engine cannot be installed: install a CUDA build of torch first"
elif [ "${cuda%%.*}" != 12 ] && [ "${cuda%%.*}" != 13 ]; then
  te_line="Transformer Engine $TE_VERSION exists for CUDA 12 and 13, and torch $torch is built for $cuda: not installed"
elif $te_whole; then
  te_plan=check te_line="Transformer Engine is installed ($te_found): will be tried"
elif [ "$free_gb" -lt 1 ]; then
  te_line="the disk is full ($free_gb GB free; Transformer Engine needs 1 GB): not installed"
else
  te_plan=install
  te_line="Transformer Engine $TE_VERSION for CUDA ${cuda%%.*} will be installed. Where no prebuilt extension fits this
     torch, pip compiles one: 5 to 15 minutes on $cores cores ($jobs at a time)"
fi
echo "Python $py, torch $torch, ${gpu:-no GPU}${capability:+ (compute capability $capability)}"
echo "  1. packages: ${missing:-none are missing}${missing:+ will be installed}; what is there stays as it is"
echo "  2. $te_line"
if [ "$te_plan" = install ] && [ -n "$te_found" ]; then echo "     leftovers are removed first: $te_found"; fi
if $dry_run; then exit 0; fi

# ------------------------------------------------------------------------------------------- doing it

torch_before=$torch
constraints=$work/constraints.txt log=$work/pip.log
printf '%s\n' "$frozen" >"$constraints"
: >"$log"
job=
trap '[ -z "$job" ] || kill "$job" 2>/dev/null; echo "colab_setup.sh: interrupted; run it again to go on"; exit 130' INT TERM

install() { # install WHAT ARGUMENTS...: pip under the constraints, a line every half minute; its output goes to the log
  local what=$1 began=$SECONDS next=30 count
  shift
  "$python" -m pip install --disable-pip-version-check --progress-bar off -c "$constraints" "$@" >>"$log" 2>&1 &
  job=$!
  while kill -0 "$job" 2>/dev/null; do
    sleep 0.5
    if [ $((SECONDS - began)) -ge $next ]; then
      # with --verbose the log holds the compiler's own count, as in [12/33]
      count=$(grep -oE "\[[0-9]+/[0-9]+\]" "$log" | tail -n 1 || true)
      echo "  $what: $((SECONDS - began)) s${count:+ $count}"
      next=$((next + 30))
    fi
  done
  wait "$job" || { job= && return 1; }
  job=
}

reason() { # the line of the log that says most
  local line
  if grep -qE "NewConnectionError|ConnectTimeout|Read timed out|name resolution|Network is unreachable|ProxyError" "$log"; then
    echo "no network (pip reached no package index)" && return
  fi
  if grep -q "from versions: none" "$log"; then
    echo "pip found no $(grep -m 1 -oE "requirement [^ ]+" "$log" | cut -d " " -f 2) (no network, or nothing for this Python)" && return
  fi
  if grep -q "No space left on device" "$log"; then echo "the disk is full" && return; fi
  line=$(grep -m 1 -E "fatal error:|externally-managed" "$log" || grep -E "(^|[A-Za-z])[Ee]rror:|^ERROR|Killed" "$log" | grep -v "subprocess-exited\|Failed to build" | tail -n 1 || true)
  [ -n "$line" ] || line=$(tail -n 1 "$log")
  echo "$line" | sed "s/^ *//" | cut -c 1-200
}

if [ -n "$missing" ]; then
  # shellcheck disable=SC2086 # a list of names
  install "packages" $missing || stop "could not install $missing: $(reason); pip's output: $log"
  echo "  installed: $missing"
fi

without="The workshop carries on without Transformer Engine"
[ "$te_plan" != none ] || finish none "Setup is done. $te_line."

try='
import torch, transformer_engine, transformer_engine.pytorch as te
done = "imported; no GPU to try it on"
if torch.cuda.is_available():
    def step(fp8):
        layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
        x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with te.autocast(enabled=fp8):
            y = layer(x)
        y.float().sum().backward()
        torch.cuda.synchronize()
    step(False)
    done = "a forward and backward ran in BF16"
    if torch.cuda.get_device_capability() >= (8, 9):
        try:
            step(True)
            done += " and FP8"
        except Exception as error:
            done += "; FP8 failed: " + (str(error).splitlines() or [repr(error)])[0]
print("Transformer Engine " + transformer_engine.__version__ + ": " + done)
'
try_te() { # in a fresh process, since a wrong build can abort it; the last line of its output is the verdict
  verdict=$("$python" -W ignore -c "$try" 2>&1) && verdict=${verdict##*$'\n'} && return 0
  printf '%s\n' "$verdict" >>"$log"
  verdict=$(printf '%s\n' "$verdict" | grep -v "^ " | tail -n 1 | cut -c 1-200)
  return 1
}

if [ "$te_plan" = check ]; then
  echo "  trying Transformer Engine (its first import takes up to half a minute)"
  if try_te; then finish ok "Setup is done. $verdict. No restart is needed."; fi
  echo "  the installed one does not work ($verdict): installing it again"
fi
if [ -n "$te_found" ]; then
  "$python" -m pip uninstall -y transformer_engine transformer_engine_torch transformer_engine_cu12 transformer_engine_cu13 >>"$log" 2>&1 ||
    finish failed "$without: $(reason). Log: $log"
fi

# Without build isolation the build sees this torch, and needs its tools installed.
tools="setuptools wheel packaging ninja"
if $has_runtime; then
  # The headers that came with torch fit it; a toolkit on this machine may be of another version.
  export NVTE_BUILD_USE_NVIDIA_WHEELS=1
  tools="$tools $header_packages"
fi
# shellcheck disable=SC2086 # a list of names
install "build tools" $tools || finish failed "$without: $(reason). Log: $log"
look # the headers' folders may have become more
export CPATH=$headers${CPATH:+:$CPATH} MAX_JOBS=$jobs
install "Transformer Engine, downloading and compiling" --verbose --no-build-isolation "transformer_engine[pytorch,core-cu${cuda%%.*}]==$TE_VERSION" ||
  finish failed "$without: $(reason). Log: $log"
echo "  installed; trying it"
if ! try_te; then
  "$python" -m pip uninstall -y transformer_engine transformer_engine_torch "transformer_engine_cu${cuda%%.*}" >>"$log" 2>&1 || true
  finish failed "$without: it was installed but does not work ($verdict), so it was removed. Log: $log"
fi
look
if [ "$torch" != "$torch_before" ]; then echo "  torch changed from $torch_before to $torch: restart the kernel before you go on"; fi
finish ok "Setup is done. $verdict. No restart is needed."
