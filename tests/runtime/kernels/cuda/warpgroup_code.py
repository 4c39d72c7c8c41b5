"""warpgroup_code.py OBJECT...: whether kernels by warpgroups have the instructions that they are written for.

Reads the machine code for sm_90a out of objects of nvcc (--no-compress). In each kernel there must be products of warpgroups
(HGMMA) and copies of tiles (UTMALDG), and no access to local memory (LDL, STL). An instruction is 16 bytes; its lowest 12 bits
name it, as nvdisasm 13 shows them: products of panels and of registers have two names. Prints a line for each kernel; exit 1."""
import struct
import subprocess
import sys

NAMES = {0x9f0: "HGMMA", 0xdf0: "HGMMA", 0x5b4: "UTMALDG", 0x983: "LDL", 0x387: "STL"}
HOPPER = 90


def images(data):
    """ELF images of device code in an object."""
    at = data.find(b"\x7fELF", 1)
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == 190:  # EM_CUDA
            yield data[at:]
        at = data.find(b"\x7fELF", at + 1)


def architecture(image):
    """The card, in an image's flags: in bits 8 to 15 from version 8 of the ABI on, before that in bits 0 to 7."""
    flags = struct.unpack_from("<I", image, 48)[0]
    return flags >> 8 & 0xff if image[8] >= 8 else flags & 0xff


def kernels(image):
    """[(name, bytes)] of an image's code."""
    table, = struct.unpack_from("<Q", image, 40)
    size, count, names_at = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = sections[names_at][4]
    for name, _, _, _, offset, length in sections:
        text = image[names + name:image.index(b"\0", names + name)].decode()
        if text.startswith(".text."):
            yield text[len(".text."):], image[offset:offset + length]


def counts(code):
    out = dict.fromkeys(NAMES.values(), 0)
    for at in range(0, len(code) - 15, 16):
        name = NAMES.get(struct.unpack_from("<Q", code, at)[0] & 0xfff)
        if name:
            out[name] += 1
    return out


def main(paths):
    seen = wrong = 0
    for path in paths:
        data = open(path, "rb").read()
        for image in images(data):
            if architecture(image) != HOPPER:
                continue
            for name, code in kernels(image):
                of = counts(code)
                bad = not of["HGMMA"] or not of["UTMALDG"] or of["LDL"] or of["STL"]
                name = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
                print("WRONG" if bad else "right", of, name[:name.find("(cairn")][:160])
                seen += 1
                wrong += bool(bad)
    print(f"{seen} kernels, {wrong} wrong")
    return 1 if wrong or not seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
