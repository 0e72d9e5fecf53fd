"""The tokenizer process: text to token ids and back. `vocabulary` holds the bytes of each token, `detokenize`
turns token streams into text as they grow (both pure, and used by gateways too), `hf_tokenizer` loads a
checkpoint's tokenizer and chat template, `chat_encoder` encodes conversations, `service` answers calls,
`server` is the process. Import the modules; this file imports none of them.
"""
