"""Many machines and many users: a head, its pool of workers, and clients that use them from anywhere.

Deciders: ``pool`` (which worker has which device of whom), ``quotas`` (who may use how much), ``refusals`` (who is not even
listened to). Shells: ``head`` (the listening process), ``tenancy`` (one session in it), ``member`` (one worker in it),
``remote`` (a client's side), ``serve`` (a worker's process), ``keys`` (the file of API keys), ``audit`` (the log).
"""
