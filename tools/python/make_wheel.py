"""make_wheel.py FOLDER VERSION GLIBC EPOCH OUT: a wheel of a folder that tools/package has made, and of the module cairn beside this.

The program, its libraries and their licences lie in cairn/installed; the command `cairn` becomes the program. The same
folder gives the same bytes. Prints the wheel's path. EPOCH: seconds since 1970, the time of each member.
"""

import base64
import hashlib
import pathlib
import sys
import time
import zipfile

# The name `cairn` is another project's on PyPI. The module and the command are `cairn`.
DISTRIBUTION = "cairn-train"
INSTALLED = ("bin", "lib", "licenses", "recipes", "LICENSE", "PACKAGE")
METADATA = """Metadata-Version: 2.1
Name: {distribution}
Version: {version}
Summary: Trains large decoder models from one Lua recipe, built around its checkpoints
License: Apache-2.0
Requires-Python: >=3.9
Requires-Dist: numpy
Provides-Extra: bf16
Requires-Dist: ml_dtypes; extra == "bf16"

The command `cairn`, and the module `cairn`, which reads and writes its checkpoints as numpy arrays.
"""


def members(folder, info, version, tag):
    """(name in the wheel, bytes, whether it is a program), but for the record."""
    for path in sorted(pathlib.Path(__file__).resolve().parent.glob("cairn/*.py")):
        yield f"cairn/{path.name}", path.read_bytes(), False
    for top in INSTALLED:
        top = folder / top
        for path in sorted(p for p in ([top] if top.is_file() else top.rglob("*")) if p.is_file()):
            yield f"cairn/installed/{path.relative_to(folder)}", path.read_bytes(), path.parent.name == "bin"
    yield f"{info}/METADATA", METADATA.format(distribution=DISTRIBUTION, version=version).encode(), False
    yield f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tools/package\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), False
    yield f"{info}/entry_points.txt", b"[console_scripts]\ncairn = cairn.launcher:main\n", False


def main(folder, version, glibc, epoch, out):
    stem = f"{DISTRIBUTION.replace('-', '_')}-{version}"
    tag = f"py3-none-manylinux_{glibc.replace('.', '_')}_x86_64"
    info, wheel = f"{stem}.dist-info", pathlib.Path(out) / f"{stem}-{tag}.whl"
    moment = time.gmtime(max(int(epoch), 315532800))[:6]  # a zip file's time begins in 1980
    record = []
    part = wheel.with_name(f".{wheel.name}")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name, data, is_program=False):
            member = zipfile.ZipInfo(name, moment)
            member.external_attr = (0o100755 if is_program else 0o100644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")

        for member in members(pathlib.Path(folder), info, version, tag):
            add(*member)
        add(f"{info}/RECORD", ("".join(record) + f"{info}/RECORD,,\n").encode())
    part.replace(wheel)
    print(wheel)


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
