"""Ids of server-sent events that no gateway has given out are refused."""

import pytest

from baton.api.openai_errors import ApiError
from baton.api.stream_positions import resume_from
from baton.v1 import inference_pb2

STARTS = [inference_pb2.GenerateStart()]


def test_an_id_says_what_the_client_has():
    resume, counts = resume_from("ticket", "7.2.1.0.1/2/15", STARTS)
    (had,) = resume.choices
    assert (had.text_characters, had.reasoning_characters, had.tool_calls) == (7, 2, 1)
    assert counts == (2, 15)


@pytest.mark.parametrize(
    "id",
    [
        "7.2.1.0.1/3/2",  # more events behind the position than there were
        "7.2.1.0.1/4000/4001",  # all that is to come would be left out
        "7.2.1.0.1/-1/2",
        "7.2.1.0.1/1/99999999999",
        "7.2.1.0.9/0/2",
        "7.2.1.0.1,7.2.1.0.1/0/2",
        "99999999999.2.1.0.1",
    ],
)
def test_other_ids_are_refused(id):
    with pytest.raises(ApiError, match="no id of an event"):
        resume_from("ticket", id, STARTS)
