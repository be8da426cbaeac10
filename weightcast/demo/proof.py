"""The proof at the end: every byte that the trainer holds against every byte in each region's files.

Uses neither our digests nor our codec: ranks wrote their own rows, the regions' files are read with safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightcast.demo.boxes import BoxPlace, load_places
from weightcast.demo.errors import DemoError
from weightcast.demo.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class RegionProof:
    """How many tensors and bytes of a region were compared, and what differed."""

    region: str
    tensors: int
    compared_bytes: int
    different: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if everything was equal, and there was something to compare."""
        return self.compared_bytes > 0 and not self.different


def prove(work: Path, world_size: int, model_dirs: Mapping[str, Path]) -> list[RegionProof]:
    """Compare the testimonies of all ranks in ``work`` with each region's directory."""
    return [_prove_region(region, path, work, world_size) for region, path in model_dirs.items()]


def _prove_region(region: str, model_dir: Path, work: Path, world_size: int) -> RegionProof:
    names: set[str] = set()
    compared_bytes = 0
    different: list[str] = []
    with LoadedModel(model_dir) as model:
        for rank in range(world_size):
            places = load_places(work / f"places-{rank}.json")
            with (work / f"testimony-{rank}.bin").open("rb") as testimony:
                for place in places:
                    found = model.rows(place)
                    names.add(place.name)
                    compared_bytes += len(found)
                    if testimony.read(len(found)) != found:
                        different.append(_where(place, rank))
                if testimony.read(1):
                    raise DemoError(f"rank {rank} holds more bytes than the files of {region}")
        # A tied head is not stored twice, by the convention of Hugging Face; anything more would be made up.
        different += [f"{name}: not published" for name in sorted(model.names - names)]
    return RegionProof(region, len(names), compared_bytes, tuple(different))


def _where(place: BoxPlace, rank: int) -> str:
    return f"{place.name} rows {place.start} to {place.start + place.rows - 1} of rank {rank}"
