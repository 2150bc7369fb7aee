"""What every service says of its certificates."""

TLS_CERT_HELP = "file with this service's certificate (PEM), shown to all others; default: no TLS"
TLS_KEY_HELP = "file with the key of --tls-cert"
TLS_CA_HELP = "file with the authority whose certificates are believed"
TLS_NAME_HELP = "name that others' certificates must have; default: the host under which they are reached"
CLEAR_KV_HELP = "with --tls-cert, KV may travel in the clear: auto means tcp or nixl, not tls; they may leave loopback"
