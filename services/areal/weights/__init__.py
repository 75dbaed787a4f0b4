"""Transports for the bytes of a policy version. No torch here.

    trainer                              weight-sync                       inference server
    ───────                              ───────────                       ────────────────
    disk    folder on a volume  ───────────────────────── path ──────────> reads the folder
    stream  upload, once  ──HTTP──> weight store ──────HTTP, ranges──────> pulls into parameters
                                          │                   the next server pulls from it ──> …
                                          └──────────> sidecar ──folder──> an unmodified SGLang
    (s3://)  upload, once ──HTTP──> object store ──────HTTP, ranges──────> the same two
    distributed  broadcast ─────────── process group ────────────────────> its parameters

The first two give the same thing: a published folder with a manifest. `disk` writes it where every
server mounts it; `stream` leaves it with weight-sync's store, which serves every version it has, so
a server that cannot see the folder pulls it instead. `delta` is an encoding for both: the trainer
writes or sends only the changes, weight-sync builds the complete file from them, and a server that
holds the previous version reads only the delta. `distributed` sends a version to serving servers
while one of the two stores it: see `broadcast`, `distributed`. `disk` with
`weight_sync.path=s3://…` uploads to an object
store, without deltas: see `objects`.
"""
