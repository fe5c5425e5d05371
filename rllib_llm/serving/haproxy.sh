#!/bin/sh
# HAProxy as Ray Serve starts it, and with a longest time of a request's head, which Ray has no
# setting for: `timeout client` begins anew with every byte that comes.
limit="timeout http-request ${RLLIB_LLM_HEAD_SECONDS}s"
for argument; do
    if [ "$option" = -f ] && ! grep -q "$limit" "$argument"; then
        sed "s/^ *timeout client .*/&\\
    $limit/" "$argument" > "$argument.timed" && mv "$argument.timed" "$argument"
    fi
    option=$argument
done
exec "$RLLIB_LLM_HAPROXY" "$@"
