"""The live page at `GET /`: what a deployment does, for its operators. `window` keeps the figures of the last
minutes, `processes` follows every process by Node.Watch, `feed` makes one stream of frames of it all for all
open pages, `app` serves the stream and the files in `static`. While no page is open, nothing runs but one
sample a second."""
