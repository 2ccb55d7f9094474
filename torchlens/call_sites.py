"""Which instructions led to a torch call: the basis of a site's identity.

A call site is the chain of (code object, instruction offset) from a module's forward
down to the torch call.  Its digest uses file base name, qualified name and offset, so
that it is equal in another process of the same Python version, wherever the code lies.
"""

import dis
import hashlib
import os
from itertools import islice
from pathlib import PurePath
from types import CodeType, FrameType

import torch

from .records import CallSite, Frame

_TORCH_FOLDER = str(PurePath(torch.__file__).parent) + os.sep
_OUR_FOLDER = str(PurePath(__file__).parent) + os.sep

_BINARY_OP = dis.opmap["BINARY_OP"]
_EMPTY = CallSite((), "")
# Order of the argument of BINARY_OP (CPython's NB_* constants); +13 is in place.
_NUM_OPERATORS = 13
_IN_PLACE = (
    "iadd",
    "iand",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imul",
    "imod",
    "ior",
    "ipow",
    "irshift",
    "isub",
    "itruediv",
    "ixor",
)
_TRUE_DIVIDE = 11
_MAX_KNOWN = 1 << 17

__all__ = ["CallSites", "digest_of", "source_frame"]


def digest_of(steps: tuple[tuple[CodeType, int], ...]) -> str:
    """Return a digest of 16 hexadecimal digits of the instructions in `steps`."""
    text = ";".join(
        f"{os.path.basename(code.co_filename)}:{code.co_qualname}:{offset}"
        for code, offset in steps
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_frame(code: CodeType, offset: int) -> Frame:
    """Return the file, line and function of one instruction."""
    position = next(islice(code.co_positions(), offset // 2, None), (None,))
    line = position[0] or code.co_firstlineno
    return Frame(code.co_filename, line, code.co_qualname)


class CallSites:
    """Walks frames up to a module's forward and interns what it finds.

    Frames of our own are left out: who else watches the same model, and so has wrapped
    its modules, is no part of where a call stands.

    Keys hold the ids of code objects, which the interned `CallSite` keeps alive;
    hashing a code object itself would hash its constants each time.
    """

    def __init__(self, boundaries: frozenset[CodeType]) -> None:
        """Walk up to code in `boundaries`."""
        self._codes = boundaries  # kept alive: the set holds ids
        self._boundaries = frozenset(map(id, boundaries))
        self._known: dict[tuple[int, ...], CallSite] = {}
        self._bytecode: dict[int, tuple[CodeType, bytes]] = {}

    def at(self, frame: FrameType | None) -> CallSite:
        """Return the call site of `frame`, up to and without the next boundary."""
        boundaries = self._boundaries
        key: list[int] = []
        start = frame
        while frame is not None:
            code = id(frame.f_code)
            if code in boundaries:
                break
            key += (code, frame.f_lasti)
            frame = frame.f_back
        site = self._known.get(tuple(key))
        if site is None:
            steps: list[tuple[CodeType, int]] = []
            frame = start
            for _ in range(len(key) // 2):
                assert frame is not None
                if not frame.f_code.co_filename.startswith(_OUR_FOLDER):
                    steps.append((frame.f_code, frame.f_lasti))
                frame = frame.f_back
            steps.reverse()
            site = CallSite(tuple(steps), digest_of(tuple(steps))) if steps else _EMPTY
            if len(self._known) >= _MAX_KNOWN:  # code that is made anew each time
                self._known.clear()
            self._known[tuple(key)] = site
        return site

    def operator(self, frame: FrameType, func_name: str) -> str | None:
        """Return the operator's own name where `frame` stands at one torch renames.

        torch reports `x += y` as `add_` and `a / b` as `div`.  Inside torch's own
        composites the reported name stays: users know those by torch's names.
        """
        code = frame.f_code
        while code.co_name == "__torch_function__" and frame.f_back is not None:
            frame = frame.f_back  # another mode's, such as that of torch.device
            code = frame.f_code
        known = self._bytecode.get(id(code))
        if known is None:
            inside = code.co_filename.startswith(_TORCH_FOLDER)
            known = self._bytecode[id(code)] = (code, b"" if inside else code.co_code)
        bytecode, offset = known[1], frame.f_lasti
        if not bytecode or offset < 0 or bytecode[offset] != _BINARY_OP:
            return None
        kind = bytecode[offset + 1]
        if kind >= _NUM_OPERATORS:
            in_place = func_name.endswith("_") or func_name.startswith("i")
            return _IN_PLACE[kind - _NUM_OPERATORS] if in_place else None
        if kind == _TRUE_DIVIDE and func_name == "div":
            return "truediv"
        return None
