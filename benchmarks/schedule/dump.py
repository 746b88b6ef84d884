"""Makes the TPU compiler write its final schedules, which it does for a whole process or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_FINAL = re.compile(r"\d+-(?P<name>.*)-\d+-final_bundles\.txt")
_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final_bundles"
)


def write_schedules(folder: Path | str) -> None:
    """Must be called before libtpu is loaded: it reads the environment then and never again."""
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        filter(None, [os.environ.get("LIBTPU_INIT_ARGS"), _FLAGS.format(folder=folder)])
    )


def use_compiler_alone() -> None:
    """Lets libtpu compile on a machine without a TPU, in several processes, without looking for one."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def schedules(folder: Path) -> dict[str, Path]:
    """Files of the final schedules by the name of their instruction, the newest of each."""
    found = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        match = _FINAL.fullmatch(path.name)
        if match and not match["name"].startswith("<late-") and match["name"] != "TLP":
            found[match["name"]] = path
    return found


def clear(folder: Path) -> None:
    """Removes what was written so far: tens of megabytes for each program."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
