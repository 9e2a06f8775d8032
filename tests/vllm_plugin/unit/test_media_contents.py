"""The content of pictures and sound that clients name, from the front end to the ledger."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam import audited_requests, media_contents
from kvtxn.integrations.vllm_plugin.seam.media_contents import CONTENTS, Media


class Inputs:
    """A prompt's inputs, hashed as vLLM does it: a name is taken for the item's hash."""

    def __init__(self, items, names):
        self.mm_data_items = {
            modality: SimpleNamespace(get_all_items_for_hash=lambda found=found: found)
            for modality, found in items.items()
        }
        self.mm_uuid_items = names

    def get_mm_hashes(self, model_id):
        given = self.mm_uuid_items or {}
        return {
            modality: [
                f"{model_id}:{item}" if name is None else name
                for item, name in zip(
                    items.get_all_items_for_hash(), given.get(modality) or [None] * 9, strict=False
                )
            ]
            for modality, items in self.mm_data_items.items()
        }


class FrontEnd:
    """An engine with what ``follow_media`` hooks."""

    def __init__(self):
        apply = SimpleNamespace(apply=lambda inputs, timing: inputs.get_mm_hashes("m"))
        self.renderer = SimpleNamespace(mm_processor=apply)
        self.input_processor = SimpleNamespace(
            process_inputs=self._process, process_inputs_async=self._process_async
        )

    @staticmethod
    def _process(names, **more):
        features = [SimpleNamespace(mm_hash=name, identifier=name, **more) for name in names]
        return SimpleNamespace(
            mm_features=features, sampling_params=SimpleNamespace(extra_args={"their": "own"})
        )

    async def _process_async(self, names, **more):
        return self._process(names, **more)

    def send(self, items, names, by="process_inputs"):
        """The request that the engine gets for pictures, and their names."""
        inputs = Inputs({"image": items}, None if names is None else {"image": names})
        hashes = self.renderer.mm_processor.apply(inputs, None)
        place = SimpleNamespace(offset=2, length=3, is_embed=None)
        return getattr(self.input_processor, by)(hashes["image"], mm_position=place)


@pytest.fixture
def engine():
    found = FrontEnd()
    media_contents.follow_media(found)
    yield found
    media_contents.unfollow_media()


def contents(request):
    return request.sampling_params.extra_args.get(CONTENTS)


def hashes(media, request):
    return [content for _, content in media.hashes(request)]


def test_named_items_are_hashed_and_others_are_named_by_their_hash(engine):
    request = engine.send(["red", "blue"], ["x", None])
    assert contents(request) == {"x": "m:red"}
    assert request.sampling_params.extra_args["their"] == "own"
    for feature, name in zip(request.mm_features, ("x", "m:blue"), strict=True):
        assert type(feature.mm_hash) is type(feature.identifier) is str
        assert feature.mm_hash == feature.identifier == name


def test_an_asynchronous_engine_sends_them_as_well(engine):
    """It has a method of its own for prompts as they come: nothing else than text may go on."""
    request = asyncio.run(engine.send(["red"], ["x"], "process_inputs_async"))
    assert contents(request) == {"x": "m:red"}
    assert {type(feature.mm_hash) for feature in request.mm_features} == {str}


@pytest.mark.parametrize("names", [None, [None]])
def test_items_without_names_cost_nothing(engine, names):
    request = engine.send(["red"], names)
    assert request.sampling_params.extra_args == {"their": "own"}


def test_an_item_that_cannot_be_hashed_counts_by_its_name(engine, lines):
    """The engine does not hash it, so its request must not fail; it is said once."""

    class Odd:
        def __format__(self, spec):
            raise TypeError("cannot be hashed")

    request = engine.send([Odd()], ["x"])
    assert contents(request) is None
    assert hashes(Media(), request) == hashes(Media(), engine.send([None], ["x"]))
    engine.send([Odd()], ["y"])
    (line,) = lines
    assert "kvtxn.media_by_name" in line


def test_one_content_is_one_item_whatever_its_name(engine):
    media = Media()
    red = hashes(media, engine.send(["red"], None))
    assert hashes(media, engine.send(["red"], ["x"])) == red
    assert hashes(media, engine.send(["blue"], ["x"])) != red


def test_a_name_alone_means_what_was_sent_with_it_last(engine):
    """So does a session's picture of an earlier turn, of which the later turn says nothing."""
    media = Media()
    assert contents(engine.send([None], ["x"])) is None
    blue = [hashes(media, engine.send([item], ["x"])) for item in ("red", "blue")][1]
    assert hashes(media, engine.send([None], ["x"])) == blue


def test_a_name_alone_means_the_same_when_a_request_comes_again(engine):
    """After it was put back: somebody else has sent another item with the name since then."""
    media = Media()
    red = hashes(media, engine.send(["red"], ["x"]))
    named = engine.send([None], ["x"])
    named.req_id = "a"
    assert hashes(media, named) == red
    blue = engine.send(["blue"], ["x"])
    blue.req_id = "b"
    assert hashes(media, blue) != red
    assert hashes(media, named) == red
    assert hashes(media, engine.send([None], ["x"])) == hashes(media, blue)


def test_one_name_for_two_items_of_a_request_is_neither(engine):
    media = Media()
    request = engine.send(["red", "blue"], ["x", "x"])
    both = hashes(media, request)
    assert both[0] == both[1]
    for item in ("red", "blue"):
        assert hashes(media, engine.send([item], ["x"])) != both[:1]


def test_a_pooling_request_has_no_sampling_parameters(engine):
    request = engine.send(["red"], ["x"])
    request.sampling_params = None
    media_contents.send_contents(request)
    assert len(hashes(Media(), request)) == 1


def test_a_worker_remembers_so_many_names(engine, monkeypatch):
    monkeypatch.setattr(media_contents, "_REMEMBERED", 2)
    media = Media()
    for name in "xyz":
        hashes(media, engine.send([name], [name]))
    assert [*media._known] == ["y", "z"]


def test_tokens_between_an_images_rows_keep_their_ids():
    """The mask of a placeholder says which positions have vectors."""
    mask = torch.tensor([True, False, True])
    place = SimpleNamespace(offset=4, length=3, is_embed=mask)
    feature = SimpleNamespace(mm_position=place, identifier="a picture")
    state = SimpleNamespace(prompt_embeds=None, mm_features=[feature])
    assert [*audited_requests._embedded(state, Media())] == [4, 6]


def test_the_mask_of_vectors_counts_and_not_only_the_vectors():
    """vllm-project/vllm#56655: the same ids and the same vectors are other rows by the mask."""
    given = {"prompt_embeds": torch.zeros(3, 2), "mm_features": None}
    found = [
        audited_requests._embedded(SimpleNamespace(prompt_is_token_ids=mask, **given), Media())
        for mask in ([True] * 3, [False, True, True], [False] * 3, None)
    ]
    assert [[*each] for each in found] == [[], [0], [0, 1, 2], [0, 1, 2]]


def test_undone_hooks_leave_the_front_end_as_it_was():
    engine = FrontEnd()
    before = [vars(each).copy() for each in (engine.renderer.mm_processor, engine.input_processor)]
    media_contents.follow_media(engine)
    media_contents.unfollow_media()
    assert before == [vars(engine.renderer.mm_processor), vars(engine.input_processor)]
    media_contents.follow_media(SimpleNamespace(renderer=SimpleNamespace(mm_processor=None)))
