"""Starts libtpu, the TPU compiler, where there is no TPU. Once in a process; its options are fixed from then on.

libtpu is kept out of site-packages: where JAX can import it and `JAX_PLATFORMS` is unset, JAX looks for a TPU first and
warns that there is none. Here it is a file that `TPU_LIBRARY_PATH`, which JAX reads too, points to.
"""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE = "TPU_LIBRARY_PATH"
PLACES = (".", "libtpu", "libtpu/libtpu")
"""Where the library may lie under the folder that is named: beside it, in the package, in what pip installed."""

SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks the cloud's metadata server, and waits for the answer
    "TPU_ACCELERATOR_TYPE": "v6e-1",  # any one will do; else it warns that it could not find out
    "TPU_WORKER_HOSTNAMES": "localhost",  # as above
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a lock file lets one process at a time at a TPU; here is none to fight for
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
KEPT = "final_bundles|final_hlo-static-per-bundle-utilization"
"""Labels of the dumps that are read. All 70 of each kernel would be a megabyte a compile."""

_dumps = TemporaryDirectory(prefix="tpu-aot-")  # goes with the process


class NoLibtpuError(Exception):
    """The compiler is not where it was said to be."""


def library(place: str | None = None) -> Path:
    """libtpu.so in `place` (a folder or the file itself), by default in what TPU_LIBRARY_PATH names.

    Raises NoLibtpuError where nothing is named or nothing is there.
    """
    named = place or os.environ.get(VARIABLE)
    how = f"`make libtpu` installs it in .venv/libtpu; name that folder by --libtpu or {VARIABLE}"
    if not named:
        raise NoLibtpuError(f"no TPU compiler: got neither a folder nor {VARIABLE}. {how}")
    found = Path(named)
    if found.is_file():
        return found
    for part in PLACES:
        if (found / part / "libtpu.so").is_file():
            return found / part / "libtpu.so"
    raise NoLibtpuError(f"no libtpu.so in {named}. {how}")


def start(place: str | None = None) -> Path:
    """Make JAX use the library, quietly; the folder that each compilation's dumps are written to.

    Raises NoLibtpuError as `library` does. Call it before anything else asks JAX for a TPU.
    """
    os.environ[VARIABLE] = str(library(place))
    return _set_options()


@cache
def _set_options() -> Path:
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    folder = _dumps.name
    dumps = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={KEPT}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dumps}".strip()
    return Path(folder)
