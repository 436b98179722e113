from typing import TypedDict

class _BuildInfo(TypedDict):
    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str
    io_uring_headers: bool
    liburing_headers: bool
    libaio_headers: bool

def build_info() -> _BuildInfo: ...
