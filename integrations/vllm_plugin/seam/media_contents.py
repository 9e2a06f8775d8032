"""Images and audio under names that clients give them, known by their content.

A client may name an image (``multi_modal_uuids``, or ``uuid`` in a chat). vLLM then takes the name
for the image, in its caches of processed inputs, of encoder outputs and of rows: another image
under the same name gets what the first one has left there. A worker never sees the other image,
since the front end drops what its cache has. So the content is hashed in the front end, and the
hash travels with the request's sampling parameters. vLLM's own hash is used; it is also its name of
an image that the client has not named, so that nothing has to be done for those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from ....log import get_logger
from .engine_protocols import BeforeInputs
from .hooks import follow, follow_async, is_swapped, precede, swap_class
from .lora_adapters import hash_of

if TYPE_CHECKING:
    from .engine_protocols import (
        EngineCoreRequest,
        Feature,
        ProcessorInputs,
        RequestContent,
        VllmEngine,
    )

T = TypeVar("T")

log = get_logger()

#: What it means that an item is not hashed, for the log.
BY_NAME: Final = "images count by the names that clients give"

#: The key of the hashes in ``SamplingParams.extra_args``, by vLLM's name of the item.
CONTENTS: Final = "kvtxn_contents"
#: Named items whose content a worker remembers; the ones that were used first are forgotten.
_REMEMBERED: Final = 1 << 16

#: What has been said of items that cannot be hashed: each prompt may have one.
_said: Final[set[str]] = set()
#: By engine, what undoes the hooks of its front end.
_undo: WeakKeyDictionary[VllmEngine, Callable[[], None]] = WeakKeyDictionary()


class Named(str):
    """The name that a client gave an item, with the hash of its content."""

    content: str


class ContentHashes(BeforeInputs):
    """Hashes items that have names, too; a mixin before the class of a prompt's inputs."""

    mm_uuid_items: Mapping[str, Sequence[str | None]] | None

    def get_mm_hashes(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Return vLLM's name of each item by modality; as a ``Named`` if a client named it.

        A ``Named`` has the hash of the item's content; an item that was sent by its name alone has
        none. If contents cannot be hashed, that is logged, once as a warning, and the names are
        vLLM's own.
        """
        names = super().get_mm_hashes(*args, **kwargs)  # type: ignore[safe-super]
        given = self.mm_uuid_items
        if not any(name is not None for each in (given or {}).values() for name in each):
            return names
        assert given is not None  # it has names
        # A name alone stands for an item that was sent before: there is nothing to hash.
        try:
            self.mm_uuid_items = {
                modality: [
                    name if item is None else None
                    for name, item in zip(
                        given[modality], items.get_all_items_for_hash(), strict=False
                    )
                ]
                for modality, items in self.mm_data_items.items()
                if modality in given
            }  # fmt: skip
            contents = super().get_mm_hashes(*args, **kwargs)  # type: ignore[safe-super]
        except Exception as error:  # of what the engine would not have hashed
            say = log.debug if _said else log.warning
            say("kvtxn.media_by_name", why=repr(error), effect=BY_NAME)
            _said.add(BY_NAME)
            return names
        finally:
            self.mm_uuid_items = given
        return {
            modality: [*map(_named, each, contents[modality])] for modality, each in names.items()
        }


def _named(name: str, content: str) -> str:
    """Return a ``Named`` with the content's hash; the name as it is if that is the hash."""
    if name == content:
        return name
    named = Named(name)
    named.content = content
    return named


def follow_media(engine: VllmEngine) -> None:
    """Let an engine's front end hash the items that clients name; ``unfollow_media`` undoes it.

    Nothing is done for a model that takes text alone.
    """
    processor = getattr(getattr(engine, "renderer", None), "mm_processor", None)
    if processor is None:  # the model takes text alone
        return

    def before(inputs: ProcessorInputs, *args: object, **kwargs: object) -> None:
        if not is_swapped(inputs):  # a processor may hand them on to another one
            swap_class(inputs, ContentHashes)

    with ExitStack() as undo:
        undo.callback(precede(processor, "apply", before))
        undo.callback(follow(engine.input_processor, "process_inputs", send_contents))
        if hasattr(engine.input_processor, "process_inputs_async"):  # has kept the method before
            undo.callback(
                follow_async(engine.input_processor, "process_inputs_async", send_contents)
            )
        _undo[engine] = undo.pop_all().close


def unfollow_media() -> None:
    """Undo ``follow_media`` for every engine of this process."""
    _said.clear()
    for engine in [*_undo]:
        _undo.pop(engine)()


def send_contents(request: EngineCoreRequest) -> None:
    """Put the hashes of a request's named items into its sampling parameters, in place.

    The names in its items become plain strings. Two contents under one name become one, of both.
    Without sampling parameters, as for pooling, nothing is sent.
    """
    contents: dict[str, str] = {}
    for feature in request.mm_features or ():
        if isinstance(name := feature.mm_hash, Named):
            feature.mm_hash = plain = str(name)
            if isinstance(feature.identifier, Named):
                feature.identifier = str(feature.identifier)
            known = contents.get(plain, name.content)  # one name for two items of a request?
            contents[plain] = known if known == name.content else f"{known} {name.content}"
    params = request.sampling_params
    if contents and params is not None:
        params.extra_args = {**(params.extra_args or {}), CONTENTS: contents}


class Media:
    """The content of items that clients have named, as a worker knows it.

    A request may use a name without an item; it means the item that was last sent with the name.
    It means the same one when it comes again, after it was put back or with a session's next turn.
    """

    def __init__(self) -> None:
        self._known: Final[OrderedDict[str, str]] = OrderedDict()
        self._meant: Final[OrderedDict[tuple[str, str], str]] = OrderedDict()  # by request and name

    def hashes(self, state: RequestContent) -> list[tuple[Feature, int]]:
        """Return each item of a request with a 64-bit hash of its content, in the request's order.

        The content is the one that the request sends with the name; else the one that the request
        had before; else the last one under this name. If none is known, it is the hash of the name.
        What was found is remembered for both later cases.
        """
        arguments = getattr(getattr(state, "sampling_params", None), "extra_args", None) or {}
        contents: Mapping[str, str] = arguments.get(CONTENTS, {})
        request, found = str(getattr(state, "req_id", "")), []
        for feature in state.mm_features or ():
            name = str(getattr(feature, "mm_hash", None) or feature.identifier)
            meant = self._meant.get((request, name)) if request else None
            content = contents.get(name) or meant or self._known.get(name)
            if content is not None:
                if content != meant:  # or else the request has come before, and others since then
                    _remember(self._known, name, content)
                if request:
                    _remember(self._meant, (request, name), content)
            found.append((feature, hash_of((content or name).encode())))
        return found


def _remember(known: OrderedDict[T, str], key: T, content: str) -> None:
    """Set an item's content; if there are too many, the one that was set first is forgotten."""
    known[key] = content
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
