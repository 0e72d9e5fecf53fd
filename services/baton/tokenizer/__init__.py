"""The tokenizer process: text to token ids and back. `vocabulary` loads a checkpoint's tokenizer and chat
template, `pieces` tells what each token stands for, `detokenize` turns token streams into text as they grow
(both pure), `streams` holds those of one call, `service` answers calls, `server` is the process. Import the
modules; this file imports none of them.
"""
