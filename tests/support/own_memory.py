"""A /dev/shm of one's own."""

import ctypes

PRIVATE, RECURSIVE, NEW_NAMESPACE = 1 << 18, 1 << 14, 0x00020000


def own_shared_memory(size, huge_pages=False):
    """Gives this process and its children a /dev/shm of `size` ("1g") alone, with huge pages on advice where the kernel
    has them; False where the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE) != 0:
        return False
    if libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None) != 0:
        return False
    options = [f"size={size},huge=advise"] if huge_pages else []
    return any(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, o.encode()) == 0 for o in options + [f"size={size}"])


def resize_shared_memory(size_bytes):
    """Of own_shared_memory: from now on it holds so much."""
    remount = 1 << 5
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", b"/dev/shm", b"tmpfs", remount, f"size={size_bytes}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "remounting /dev/shm")
