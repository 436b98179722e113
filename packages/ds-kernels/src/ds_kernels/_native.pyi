from typing import TypedDict

class _BuildInfo(TypedDict):
    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str

def build_info() -> _BuildInfo: ...
def cpu_level() -> str: ...
