"""Type-check the wheel, as users get it, and make sure that every file was looked at.

``mypy -p kvtxn`` on an editable install sees only part of the package (backends
and integrations live in other folders) and says "Success" all the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from building import ROOT, build_wheel, sources


def main() -> int:
    """Build the wheel, unpack it elsewhere, run mypy there, compare the file count."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        with zipfile.ZipFile(build_wheel(Path(folder))) as archive:
            archive.extractall(site)
        wanted = len(list(site.rglob("*.py")))
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        done = subprocess.run(
            [*command, "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "kvtxn"],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(site)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    print(done.stdout, end="")
    seen = re.search(r"in (\d+) source files", done.stdout)
    total = len(sources())
    if done.returncode == 0 and (seen is None or not int(seen[1]) == wanted == total):
        print(f"only {seen and seen[1]} of {total} files were checked ({wanted} in the wheel)")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
