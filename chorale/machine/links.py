"""Links between GPUs, from ``nvidia-smi topo``. Torch-free; links are unknown if the tool is missing."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence

from chorale.machine import nvidia_smi


def links(uuids: Sequence[str] = ()) -> list[str]:
    """Returns the kinds of links between the GPUs with these UUIDs (none given: between all of the machine),
    as ``nvidia-smi topo -m`` names them; [] if they are unknown."""
    among = None
    if uuids:
        among = [int(index) for index, uuid in nvidia_smi.query("gpu", "index", "uuid") if uuid in uuids]
        if len(among) < len(uuids):
            return []
    return read_links(nvidia_smi.run("topo", "-m"), among)


def peer_access() -> list[str]:
    """Returns the kinds of access to each other's memory ("OK", or why not), or [] if unknown."""
    return read_links(nvidia_smi.run("topo", "-p2p", "r"))


def read_links(table: str, among: Collection[int] | None = None) -> list[str]:
    """Reads the rows of the GPUs: each has an entry for every GPU, "X" for itself. ``among``: numbers of the
    GPUs whose links are returned."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()
    rows = [line.split() for line in lines if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # skip the heading
    chosen = [place for place, row in enumerate(rows) if among is None or int(row[0][3:]) in among]
    entries = {rows[one][1 + other] for one in chosen for other in chosen if one != other}
    return sorted(entries - {"X"})


def name_links(kinds: Sequence[str]) -> str:
    """Returns the kinds by bus: "NVLink (NV18)", "NVLink (NV4), PCIe (SYS)"; "" for none."""
    by_bus = {
        "NVLink": [kind for kind in kinds if kind.startswith("NV")],
        "PCIe": [kind for kind in kinds if not kind.startswith("NV")],
    }
    return ", ".join(f"{bus} ({', '.join(found)})" for bus, found in by_bus.items() if found)


class LinkFinder:
    """Asks for the links between some GPUs in a thread, while an engine loads."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._found = ""
        self._thread = threading.Thread(target=self._find, args=(uuids,), name="links", daemon=True)
        self._thread.start()

    def _find(self, uuids: Sequence[str]) -> None:
        self._found = name_links(links(uuids))

    def found(self) -> str:
        """Returns the links' names, or "" if they are unknown. Waits as long as for one call of the tool."""
        self._thread.join(nvidia_smi.SECONDS)
        return self._found
