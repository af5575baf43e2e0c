"""Speech synthesis programs, installed or bundled into a folder, and random prosody for mbrola."""

import os
import platform
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vivavoce.errors import InputError, MissingDependencyError

MBROLA_PACKAGES = "mbrola mbrola-us1 mbrola-us2 mbrola-us3 mbrola-en1 mbrola-sw2"
DEBIAN_PACKAGES = {
    "flite": "flite",
    "espeak-ng": "espeak-ng",
    "festival": "festival festvox-kdlpc16k festvox-us-slt-hts",
    "mbrola": f"{MBROLA_PACKAGES} (contrib and non-free)",
    "pico2wave": "libttspico-utils (non-free)",
}
OPTIONAL = ("mbrola", "pico2wave")
FESTIVAL_DATA = Path("/usr/share/festival")
MBROLA_DATA = Path("/usr/share/mbrola")
PICO_DATA = Path("/usr/share/pico")
ARCHIVE = ".tar.xz"
LOADER = {"aarch64": "ld-linux-aarch64.so.1"}.get(platform.machine(), "ld-linux-x86-64.so.2")
MBROLA_BINARY = "mbrola-itself"


@dataclass(frozen=True)
class Programs:
    """How to start each synthesizer: its command prefix and environment.

    `parts` are the installed data of optional voices: mbrola databases, pico languages, festival voices.
    """

    commands: dict[str, tuple[str, ...]]
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    parts: frozenset[str] = frozenset()
    mbrola: Path = MBROLA_DATA  # folder of mbrola databases

    def database(self, name: str) -> Path:
        """Path of an mbrola database: Debian puts each into its own folder, `bundle` does not."""
        return self.mbrola / name / name if (self.mbrola / name).is_dir() else self.mbrola / name

    def command(self, program: str) -> tuple[str, ...]:
        """The command of a program; MissingDependencyError with its package if it is missing."""
        if program not in self.commands:
            raise MissingDependencyError(f"{program} is not installed: apt install {DEBIAN_PACKAGES[program]}")
        return self.commands[program]


def programs(root: Path | None = None) -> Programs:
    """The installed synthesizers, or those of a folder or archive written by `bundle`."""
    if root is None:
        paths = {program: shutil.which(program) for program in DEBIAN_PACKAGES}
        installed: dict[str, tuple[str, ...]] = {program: (path,) for program, path in paths.items() if path}
        return Programs(installed, parts=_parts(installed, MBROLA_DATA, PICO_DATA, FESTIVAL_DATA))
    folder = _unpacked(Path(root).resolve())
    loader = folder / "lib" / LOADER
    if not loader.exists():
        raise InputError(
            f"{folder} holds no synthesizers for {platform.machine()} ({LOADER} is missing); "
            "write it with voices.bundle on such a machine"
        )
    start = (str(loader), "--library-path", str(folder / "lib"))
    festival = str(folder / "festival")
    data = {"espeak-ng": (f"--path={folder}",), "festival": ("--libdir", festival, "--datadir", festival)}
    present = [program for program in DEBIAN_PACKAGES if (folder / "bin" / program).exists()]
    commands = {program: (*start, str(folder / "bin" / program), *data.get(program, ())) for program in present}
    databases = folder / "espeak-ng-data" / "mbrola"
    if "mbrola" in commands:
        commands["mbrola"] = (str(folder / "bin" / "mbrola"),)  # a script that finds the loader itself
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}"}
    parts = _parts(commands, databases, folder / "pico", folder / "festival")
    return Programs(commands, environment, parts, databases)


def _parts(commands: Container[str], mbrola: Path, pico: Path, festival: Path) -> frozenset[str]:
    names = [path.name for path in festival.glob("voices/*/*")]
    if "mbrola" in commands:
        names += [path.name for path in mbrola.glob("*")]
    if "pico2wave" in commands:
        names += [path.name.removesuffix("_ta.bin") for path in pico.glob("lang/*_ta.bin")]
    return frozenset(names)


def bundle(target: Path) -> None:
    """Copy the synthesizers with their libraries and English data, for a machine that has none.

    To a folder, or to an archive if the target ends in `.tar.xz`, which is unpacked at its first use.
    """
    target = Path(target)
    if not target.name.endswith(ARCHIVE):
        _copy_programs(target)
        return
    with tempfile.TemporaryDirectory() as folder:
        _copy_programs(Path(folder))
        with tarfile.open(target, "w:xz", preset=6) as archive:
            archive.add(folder, arcname="")


def _unpacked(root: Path) -> Path:
    """The folder itself, or the folder that an archive is unpacked to."""
    if not root.name.endswith(ARCHIVE):
        return root
    folder = root.with_name(root.name.removesuffix(ARCHIVE))
    if not (folder / "lib" / LOADER).exists():
        if not root.exists():
            raise InputError(f"{root} does not exist; write it with voices.bundle")
        with tempfile.TemporaryDirectory(dir=root.parent) as partial, tarfile.open(root) as archive:
            archive.extractall(partial, filter="data")
            shutil.copytree(partial, folder, dirs_exist_ok=True)
    return folder


def _copy_programs(folder: Path) -> None:
    present = programs()
    for part in ("bin", "lib"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for program in DEBIAN_PACKAGES:
        if program in OPTIONAL and program not in present.commands:
            continue
        binary = Path(present.command(program)[0]).resolve()
        shutil.copy2(binary, folder / "bin" / (MBROLA_BINARY if program == "mbrola" else program))
        for library in _libraries(binary):
            shutil.copy2(library.resolve(), folder / "lib" / library.name)
    _copy_espeak_data(folder / "espeak-ng-data")
    _copy_festival_data(folder / "festival")
    if "mbrola" in present.commands:
        _copy_mbrola(folder)
    if "pico2wave" in present.commands:
        for path in PICO_DATA.glob("lang/en-*"):
            _copy(path, folder / "pico" / "lang" / path.name)


def _copy_mbrola(folder: Path) -> None:
    """Copy databases to where espeak-ng looks, and write a script `mbrola` that starts it with bundled libraries."""
    script, libraries = folder / "bin" / "mbrola", '"${0%/*}"/../lib'
    shutil.copy2(folder / "lib" / LOADER, folder / "lib" / "mbrola")  # espeak-ng waits for a process of this name
    start = f'exec {libraries}/mbrola --library-path {libraries} "${{0%/*}}"/{MBROLA_BINARY} "$@"'
    script.write_text(f"#!/bin/sh\n{start}\n")
    script.chmod(0o755)
    for package in MBROLA_PACKAGES.split()[1:]:
        name = package.removeprefix("mbrola-")
        if (MBROLA_DATA / name / name).exists():
            _copy(MBROLA_DATA / name / name, folder / "espeak-ng-data" / "mbrola" / name)


def _libraries(binary: Path) -> list[Path]:
    listing = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=True).stdout
    return [Path(path) for path in re.findall(r"(/\S+\.so\S*)", listing)]


def _copy_espeak_data(target: Path) -> None:
    version = subprocess.run(["espeak-ng", "--version"], capture_output=True, text=True, check=True).stdout
    source = Path(version.split("Data at:")[1].strip())
    phonemes = ("intonations", "phondata", "phonindex", "phontab", "mbrola_ph")
    for name in (*phonemes, "en_dict", "lang/gmw", "voices/!v", "voices/mb"):
        _copy(source / name, target / name)


def _copy_festival_data(target: Path) -> None:
    """Copy festival's data without dictionary sources."""
    if not FESTIVAL_DATA.is_dir():
        raise MissingDependencyError(f"{FESTIVAL_DATA} is missing: apt install {DEBIAN_PACKAGES['festival']}")
    for path in FESTIVAL_DATA.rglob("*"):
        if path.is_file() and not path.name.startswith("cuvoald"):
            _copy(path, target / path.relative_to(FESTIVAL_DATA))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


Pairs = Sequence[tuple[str, str]]
# Pairs of vowels that accents exchange, in the symbols of a database.
AMERICAN = (
    *(("I", "E"), ("I", "i"), ("E", "{"), ("I", "@"), ("A", "O"), ("A", "V"), ("V", "@"), ("U", "u"), ("U", "V")),
    *(("{", "A"), ("@U", "O"), ("EI", "E"), ("EI", "i"), ("AI", "OI"), ("AI", "A"), ("aU", "@U"), ("E", "@")),
)
BRITISH = (
    *(("I", "e"), ("I", "i:"), ("e", "{"), ("I", "@"), ("Q", "O:"), ("Q", "A:"), ("V", "@"), ("U", "u:"), ("U", "V")),
    *(("{", "A:"), ("@U", "O:"), ("eI", "e"), ("eI", "i:"), ("aI", "OI"), ("aI", "A:"), ("aU", "@U"), ("3:", "@")),
)
NEIGHBOURS = {"us1": AMERICAN, "us2": AMERICAN, "us3": AMERICAN, "en1": BRITISH}
SILENCE = "_"


@dataclass(frozen=True)
class ProsodyRange:
    """Ranges of prosody drawn for each sentence."""

    tempo: tuple[float, float] = (0.75, 1.3)
    length: float = 0.22  # standard deviation of the log duration of each phone
    pitch: tuple[float, float] = (0.75, 1.35)
    melody: tuple[float, float] = (0.2, 1.6)  # factor on pitch deviations from the mean
    accents: tuple[int, ...] = (0, 1, 1, 2, 3)  # number of vowel pairs exchanged throughout a sentence
    exchanged_share: float = 0.04  # share of phones exchanged independently
    shortened_share: float = 0.3  # probability that consonants are shortened


def varied_prosody(phonemes: str, database: str, draw: random.Random, prosody: ProsodyRange | None = None) -> str:
    """Mbrola input (phone, milliseconds, pitch points per line) with random prosody."""
    prosody = prosody or ProsodyRange()
    neighbours = NEIGHBOURS.get(database, ())
    lines = [line.split() for line in phonemes.splitlines() if line.strip() and not line.startswith(";")]
    points = [float(value) for line in lines for value in line[3::2]]
    mean = sum(points) / len(points) if points else 0.0
    tempo, pitch, melody = (draw.uniform(*span) for span in (prosody.tempo, prosody.pitch, prosody.melody))
    accent = dict(_vowel_pair(neighbours, draw) for _ in range(draw.choice(prosody.accents) if neighbours else 0))
    consonant_factor = draw.uniform(0.7, 1.0) if draw.random() < prosody.shortened_share else 1.0
    lines_out = []
    for sound, length, *melodies in lines:
        name = accent.get(sound, sound)
        if draw.random() < prosody.exchanged_share:
            name = _other_vowel(name, neighbours, draw)
        factor = 1.0 if sound == SILENCE else tempo * draw.lognormvariate(0.0, prosody.length)
        factor *= 1.0 if melodies or sound == SILENCE else consonant_factor
        heights = [f"{max(50.0, pitch * (mean + melody * (float(value) - mean))):.0f}" for value in melodies[1::2]]
        pitch_points = [
            word for position, height in zip(melodies[::2], heights, strict=True) for word in (position, height)
        ]
        lines_out.append(" ".join([name, f"{max(10.0, float(length) * factor):.0f}", *pitch_points]))
    return "\n".join(lines_out) + "\n"


def _vowel_pair(neighbours: Pairs, draw: random.Random) -> tuple[str, str]:
    one, other = draw.choice(neighbours)
    return (one, other) if draw.random() < 0.5 else (other, one)


def _other_vowel(sound: str, neighbours: Pairs, draw: random.Random) -> str:
    choices = [other for pair in neighbours if sound in pair for other in pair if other != sound]
    return draw.choice(choices) if choices else sound
