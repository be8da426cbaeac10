"""The small files beside the weights: what an engine needs to load the directory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from trainer_agent.errors import Misuse
from weight_store.errors import PreconditionFailed
from weight_store.keys import asset_key
from weight_store.receipt import Asset, is_asset_name
from weight_store.records import sha256_hex
from weight_store.store import Store

MAX_ASSETS = 256
MAX_ASSET_BYTES = 1 << 30

_WANTED = re.compile(
    r".*\.(json|jinja|tiktoken)|tokenizer.*|.*\.model|vocab\..*|merges\.txt|special_tokens_map.*|.*\.spm"
)


def is_asset(name: str) -> bool:
    """True for configuration, tokenizer and template files of a Hugging Face directory."""
    return bool(_WANTED.fullmatch(name)) and is_asset_name(name)


def find_assets(directory: Path) -> list[Path]:
    """The assets of ``directory``, by name. Raises ``Misuse`` if it is no directory or holds absurdly many."""
    if not directory.is_dir():
        raise Misuse(f"assets_dir {directory} is not a directory")
    found = sorted(path for path in directory.iterdir() if path.is_file() and is_asset(path.name))
    if len(found) > MAX_ASSETS:
        raise Misuse(f"{directory} holds {len(found)} JSON and tokenizer files; at most {MAX_ASSETS} are published")
    return found


async def upload_assets(store: Store, run: str, directory: Path) -> tuple[Asset, ...]:
    """Store every asset under its digest and return how a receipt lists them."""
    assets: list[Asset] = []
    for path in find_assets(directory):
        if path.stat().st_size > MAX_ASSET_BYTES:
            raise Misuse(f"{path} has more than {MAX_ASSET_BYTES} bytes: too large for a file beside the weights")
        data = path.read_bytes()
        asset = Asset(name=path.name, sha256=sha256_hex(data), size=len(data))
        with contextlib.suppress(PreconditionFailed):  # named by its content: whoever was first wrote the same
            await store.create(asset_key(run, asset.sha256), data)
        assets.append(asset)
    return tuple(assets)
