"""npm packages that tests drive, locked in `node/` and installed once, outside the repository."""

import hashlib
import shutil
import subprocess
from pathlib import Path

NODE = Path(__file__).parent / "node"


def npm_folder() -> Path:
    """The folder with `node_modules`."""
    lock = (NODE / "package-lock.json").read_bytes()
    folder = Path.home() / ".cache" / "vivavoce-tests" / f"node-{hashlib.sha256(lock).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(NODE / name, folder / name)
    if not (folder / "node_modules" / ".package-lock.json").is_file():
        npm = [shutil.which("npm"), "ci", "--no-audit", "--no-fund"]
        subprocess.run(npm, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def installed(script: str) -> Path:
    """A script of `node/` beside the packages."""
    return Path(shutil.copy(NODE / script, npm_folder() / script))
