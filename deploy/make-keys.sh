#!/usr/bin/env bash
# Make the keys of a fleet: one pair for each role, and allow.json, the list of who may connect.
# What is there already stays as it is, so it may run again: keys are never overwritten, and a
# name that was revoked is not let in again.
set -euo pipefail

if (($# != 1)); then
    echo "usage: make-keys.sh DIRECTORY" >&2
    exit 2
fi
umask 077
mkdir -p "$1"
cd "$1"

# The router's key stands in no list: its peers find router.pub beside their own key.
if [[ ! -e router.key ]]; then
    rolloutbus keys new router
fi

add() { # NAME ROLE
    if [[ ! -e $1.key ]]; then
        rolloutbus keys new "$1"
        rolloutbus keys allow "$1.pub" --name "$1" --role "$2"
    fi
}

add store store
add worker worker       # of all workers: worker-0, worker-1, …
add trainer trainer
add probe subscriber    # asks for the status, and cannot do more than watch
add operator admin
