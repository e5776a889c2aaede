"""The tokens of a checkpoint that are no pieces of text, as a grammar names them. It must not know what they mean."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer


class AddedTokens:
    """The tokens that are no pieces of text, but for those that end texts."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int]) -> None:
        added = {one: token for one, token in tokenizer.get_added_tokens_decoder().items() if one not in end_token_ids}
        self._visible = {one for one, token in added.items() if not token.special}
        self._all = {*added}
        self._ids = {token.content: one for one, token in added.items()}

    def one(self, text: str) -> str | None:
        """A grammar's name of the token of a mark, if there is one."""
        found = self._ids.get(text)
        return None if found is None else f"<[{found}]>"

    def any(self, *, but: str = "", visible: bool = False) -> str | None:
        """A grammar's name of all of them, but that of a mark; those that are `visible` are part of a reply's text."""
        found = (self._visible if visible else self._all) - {self._ids.get(but)}
        return f"<[{','.join(map(str, sorted(found)))}]>" if found else None
