"""The gateway's HTTP side, and its process (`server`). `http_api` has the routes and what all of them share;
each API has a file of its routes (`…_api`), one that reads its requests into the messages of
baton.v1.Inference (`…_protocol`), and one that makes its answers of them (`…_answers`); `openapi`
describes them all. `page/` is the live page. Uses `gateway`, which knows nothing of it. Import the
modules; this package imports nothing."""
