"""The gateway's API once more, over gRPC: `antiphon.v1.Inference`, health and reflection.

A twin and not a second gateway: a call becomes a request like HTTP's (`request`), its message the JSON body that HTTP's
client would have sent (`to_json`), and the answer's JSON becomes messages again (`from_json`). What stands between is
the gateway itself. It is imported only where `--grpc-port` asks for it.
"""
