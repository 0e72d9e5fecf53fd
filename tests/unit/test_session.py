"""Sessions: which tokens a turn continues with."""

import pytest

from baton.gateway.prompts import EncodedPrompt, GatewaySession
from baton.gateway.token_log import ChoiceLog
from baton.rpc.errors import BatonError
from baton.v1 import common_pb2
from baton.v1.tokenizer_pb2 import ChatMessage, ChatPrompt

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def answer(tokens, text, finish_reason, stop=()):
    choice = ChoiceLog(0, stop, 0)
    choice.append(tokens, text, finish_reason=finish_reason)
    return choice


def chat(tokens, conversation, rendered):
    return EncodedPrompt(tokens, "chat", conversation, rendered)


def user(text):
    return ChatPrompt(messages=[ChatMessage(role="user", content=text)])


def test_text_goes_on_after_the_last_token():
    session = GatewaySession()
    session.begin(chat=False, n=1)
    session.commit(EncodedPrompt([1, 2], "text"), answer([3, 4], "x", LENGTH))
    session.end()
    assert session.token_ids == [1, 2, 3, 4]


def test_chat_renders_the_whole_conversation_and_encodes_the_remainder():
    session = GatewaySession()
    session.begin(chat=True, n=1)
    whole = session.conversation(user("hi"))
    assert session.encoded_text == ""  # nothing to continue yet
    session.commit(chat([1, 2], whole, "<u>hi</u><a>"), answer([3, 4, 0], "hello", STOP))
    session.end()
    # The token that ended the answer is left out: the template writes it again.
    assert session.token_ids == [1, 2, 3, 4]
    session.begin(chat=True, n=1)
    whole = session.conversation(user("more"))
    assert [(m.role, m.content) for m in whole.messages] == [
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "more"),
    ]
    assert session.encoded_text == "<u>hi</u><a>hello"


def test_an_answer_cut_by_length_keeps_its_last_token():
    session = GatewaySession()
    session.begin(chat=True, n=1)
    session.commit(chat([1], session.conversation(user("hi")), "r"), answer([2, 3], "he", LENGTH))
    assert session.token_ids == [1, 2, 3]
    assert session.encoded_text == "rhe"


def test_a_template_that_rewrites_earlier_turns_starts_afresh():
    session = GatewaySession()
    session.begin(chat=True, n=1)
    said = session.conversation(user("hi"))
    session.commit(chat([1], said, "<u>hi</u><a>"), answer([2, 0], " hello ", STOP))
    assert not "<u>hi</u><a>hello</a>".startswith(session.encoded_text)


def test_after_a_stop_string_chat_starts_afresh():
    session = GatewaySession()
    session.begin(chat=True, n=1)
    cut = answer([2, 3], "one STOP", 0, stop=["STOP"])
    session.commit(chat([1], session.conversation(user("hi")), "r"), cut)
    assert session.encoded_text == ""


def test_what_a_turn_may_not_do():
    session = GatewaySession()
    with pytest.raises(BatonError) as error:
        session.begin(chat=True, n=2)
    assert error.value.field == "n"
    session.begin(chat=True, n=1)
    with pytest.raises(BatonError) as error:
        session.begin(chat=True, n=1)
    assert error.value.reason == "SESSION_BUSY"
    session.commit(chat([1], user("hi"), "r"), answer([2], "x", LENGTH))
    session.end()
    with pytest.raises(BatonError) as error:
        session.begin(chat=False, n=1)
    assert error.value.field == "session"


def test_a_failed_turn_leaves_no_trace():
    session = GatewaySession()
    session.begin(chat=True, n=1)
    session.conversation(user("lost"))
    session.end()
    session.begin(chat=False, n=1)  # not even of its kind
    assert session.token_ids == []


def test_a_turn_renders_its_own_tools_and_arguments():
    chat = ChatPrompt(messages=[{"role": "user", "content": "a"}], tools=[{"name": "f"}])
    chat.template_arguments.update({"enable_thinking": False})
    chat.parallel_tool_calls = False
    assert GatewaySession().conversation(chat) == chat
