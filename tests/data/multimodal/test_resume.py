"""A saved position: small, without pixels, and continued bit for bit from any batch."""

import hashlib
import json

import pytest

TIGHT = {"batch_size": 2, "seq_len": 150, "max_patches": 320, "on_bad_record": "skip"}


def digest(batch):
    return hashlib.sha256(b"".join(key.encode() + batch[key].tobytes() for key in sorted(batch))).hexdigest()


def take(data, count):
    return [digest(next(data)) for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("changes", [{"batch_size": 2}, TIGHT], ids=["free", "max_patches"])
def test_stopping_several_times_gives_the_batches_of_a_straight_run(make_data, changes, prefetch):
    with make_data(**changes, prefetch=2) as data:
        straight = take(data, 40)
        skipped = data.skipped_records
    assert len(set(straight)) == 40
    resumed, state, named = [], None, 0
    for stop in (7, 8, 19, 30, 40):
        with make_data(**changes, prefetch=prefetch) as data:
            if state is not None:
                data.set_state(json.loads(state))
                assert json.dumps(data.get_state()) == state
            resumed += take(data, stop - len(resumed))
            state = json.dumps(data.get_state())
            named += len(data.get_state()["position"]["packer"]["documents"])
    assert resumed == straight
    assert named > 4, "documents of unfinished rows were read again"
    assert data.skipped_records == skipped


def test_every_position_can_be_continued_from_on_the_same_iterator(make_data):
    with make_data(**TIGHT) as data, make_data(**TIGHT) as second:
        states, digests = [data.get_state()], []
        for _ in range(25):
            digests += take(data, 1)
            states.append(data.get_state())
        packers = [state["position"]["packer"] for state in states]
        assert any(packer["ready"] for packer in packers), "some rows wait for the next batch"
        assert any(len(packer["open"]) > 1 for packer in packers)
        for place in range(0, 24, 2):
            second.set_state(states[place])
            assert take(second, 2) == digests[place : place + 2]


def test_the_state_holds_positions_and_no_pixels(make_data):
    with make_data(batch_size=2) as data:
        sizes = []
        for _ in range(20):
            next(data)
            sizes.append(len(json.dumps(data.get_state()["position"])))
    assert max(sizes) < 2000


def test_devices_may_change_without_max_patches_and_must_not_with_it(make_data):
    def contents(batch):
        return sorted(row.tobytes() for row in batch["input_ids"])

    with make_data() as data, make_data(shards=2, ranks=2) as other:
        next(data)
        other.set_state(data.get_state())
        assert [contents(next(other)) for _ in range(5)] == [contents(next(data)) for _ in range(5)]
    with make_data(max_patches=2048) as data, make_data(max_patches=2048, shards=2) as other:
        next(data)
        with pytest.raises(ValueError, match="devices: saved"):
            other.set_state(data.get_state())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 4}, "seed"),
        ({"train_on": "all"}, "train_on"),
        ({"seq_len": 200}, "seq_len"),
        ({"batch_size": 8}, "batch_size"),
        ({"advance": "original"}, "advance"),
        ({"packing": "none"}, "packing"),
    ],
)
def test_a_position_of_other_settings_is_refused(make_data, changes, name):
    with make_data() as data, make_data(**changes) as other:
        next(data)
        with pytest.raises(ValueError, match=f"{name}: saved"):
            other.set_state(data.get_state())


def test_other_weights_and_files_are_refused(make_data, files):
    sources = [(str(files / "chats.jsonl"), 2), (str(files / "texts.jsonl"), 1)]
    with make_data() as data, make_data(sources=sources) as fewer:
        next(data)
        with pytest.raises(ValueError, match="files: "):
            fewer.set_state(data.get_state())
    with make_data(sources=sources) as data, make_data(sources=[sources[0], (sources[1][0], 2)]) as heavier:
        next(data)
        with pytest.raises(ValueError, match="mixture: saved"):
            heavier.set_state(data.get_state())


def test_an_image_that_changed_size_since_is_refused(make_data, tmp_path, chat_of):
    from PIL import Image

    chats = [chat_of("what?", "blue", f"{i}.png") for i in range(5)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for i in range(5):
        Image.new("RGB", (24, 24)).save(tmp_path / f"{i}.png")
    sources = [(str(tmp_path / "chats.jsonl"), 1)]
    with make_data(sources=sources, batch_size=1) as data:
        next(data)
        state = data.get_state()
    assert state["position"]["packer"]["documents"]
    for i in range(5):
        Image.new("RGB", (48, 48)).save(tmp_path / f"{i}.png")
    with make_data(sources=sources, batch_size=1) as data, pytest.raises(ValueError, match=r"chats.jsonl, line \d .* now it has"):
        data.set_state(state)
    (tmp_path / "0.png").unlink()
    for i in range(1, 5):
        (tmp_path / f"{i}.png").unlink()
    with make_data(sources=sources, batch_size=1) as data, pytest.raises(ValueError, match="cannot be read any more"):
        data.set_state(state)
