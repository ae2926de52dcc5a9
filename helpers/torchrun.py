"""Starts torchrun from Python, on this machine: what a notebook and a benchmark use. In a terminal, call torchrun itself."""

import os
import socket
import subprocess
import sys
import tempfile

from helpers import results


def torchrun(ranks: int, program: list[str], port: int | None = None, **variables: str) -> str:
    """Runs `program` (a script, or "-m" and a module, and arguments) in `ranks` processes; prints and returns what they print.

    `port`: where the ranks meet; None takes a free one. `variables` are added to the environment. Ranks share the
    cores. Raises ValueError if the port is in use, before anything is started, and RuntimeError with the first failed
    rank's error if the job fails. An interrupt ends all ranks.
    """
    if port is not None:
        check_port(port)
    place = ["--standalone"] if port is None else ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", str(ranks), *program]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    paths = [str(results.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
    if sys.platform == "win32":
        environment |= {"USE_LIBUV": "0"}  # torch asks for it there, and is built without it
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=results.ROOT
        ) as job:
            try:
                lines = []
                for line in job.stdout:
                    print(line, end="", flush=True)
                    lines.append(line)
            except BaseException:
                job.terminate()  # torchrun ends its ranks; killed, it would leave them behind
                raise
        errors.seek(0)
        said = errors.read()
    if job.returncode:
        raise RuntimeError(f"the job of {ranks} ranks failed (status {job.returncode}).\n{root_cause(said)}")
    if said:
        print(said, end="", file=sys.stderr)
    return "".join(lines)


def root_cause(said: str) -> str:
    """From what torchrun and its ranks wrote: the first failure as torchrun saw it, else the last lines."""
    _, found, cause = said.rpartition("Root Cause (first observed failure):")
    return cause.strip(" =\n") if found else "\n".join(said.splitlines()[-15:])


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}), perhaps by another job; give another, or none to take a free one"
            ) from None
