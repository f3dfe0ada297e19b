-- Steps on locks and on records, several in one call. Each step is atomic by itself and harms no other:
-- whatever goes wrong with it is its own answer. All files are one script:
--   always.lua   what every call needs, and the short call of a release
--   alone.lua, queue.lua  the other short calls
--   common.lua   what steps are made of, but for those in run.lua
--   steps.lua    the rarer steps on locks; those on records are in records.lua, those of each further kind of lock in a
--                file of that name, those on several locks at once in several.lua
--   crowded.lua  plain locks that many processes wait for
--   operations.lua  the entries in which clients describe themselves
--   rarer.lua    the end of one more function, with the families that no call needs alone
--   rare.lua     the end of what is made only in a call that needs it: all from common.lua on is one function
--   run.lua      takes the steps in turn, and has the three that are most of the work; rest.lua is the end of its loop,
--                with all that these do seldom, and all others
--
-- KEYS[1]      the fence of this prefix, in a Cluster of this slot: the last fencing token that was given. In a
--              Cluster, where no step gives a token, the key of the first step again
-- KEYS[1 + i]  the lock or record of step i
-- ARGV[1]      the server time in µs after which acquires refuse themselves
-- ARGV[2]      how many acquires there are
-- ARGV[3]      how many fencing tokens they want in all
-- ARGV[4]      1 in a Cluster, else 0
-- ARGV[5...]   for each step its name and its arguments:
--                acquire GRANT LEASE-ms TOKENS | release GRANT CHANNEL |
--                renew LEASE-ms COUNT GRANT... (it has as many keys as grants) | all, see several.lua
--                any other: the number of its arguments, its arguments
--
-- Common calls are shorter, with these ARGV:
--   acquire, ARGV[1] as above, GRANT, LEASE-ms, TOKENS, in a Cluster also 1 (elsewhere RESTORE and INCRBY acquire most plain locks
--            without the script)
--            KEYS: the fence, the lock. Reply: the last token alone, which is the server time, if it has all of them
--   release, GRANT, CHANNEL (not in a Cluster, and rare: HDEL and PUBLISH without the script release most plain locks)
--            KEYS: the lock. Reply: the answer alone, if it was released
--   queue, ARGV[1] as above, CLIENT, LEASE-ms, TOKENS, WAITS, LAST-ms, CHANNEL, for each step its name and NUMBER (not in a
--            Cluster): `fair` and `release_fair` on one lock, see fair.lua. A grant is CLIENT and NUMBER
--            KEYS: the fence, the lock, its queue, the times of the queue. Reply: as that of the long form
-- Whatever else becomes of them is the reply to the same steps in the long form.
--
-- Reply: { server time in µs, answer of step 1, answer of step 2, ... }; the time is 0 where only locks were released
-- or renewed, all of which were held.
-- Common answers are numbers:
--   acquire  two: the first fencing token, how many there are; or one: -2 - PTTL when the lock is busy
--   renew    1 all are renewed; or { 'others', PLACE, 0 (gone) or MESSAGE (not done), ... } for those that
--            are not, places counted from 1
--   release  0 gone; released: 1 + how many were notified, -1 where notifications are forbidden
-- Releases and renewals of other kinds answer in numbers likewise. All others are arrays whose first element says
-- what they are:
--   acquired FIRST COUNT | busy PTTL [AGAIN-ms or -1 [LISTENERS]] | late | released HEARD | gone |
--   holders KIND ID COUNT PTTL, for each of them | free |
--   taken TYPE (the key holds other data) | failed MESSAGE (nothing was changed)
--
-- Data, as Redisson 4.7 has them: HASH name { holder -> holds }, its TTL is the lease. Here a holder is the
-- id of a grant and its count is always 1; 0 for one that was released and keeps its key for a while yet.
--
-- A command costs a fifth of a microsecond or more, as do a call of string.format, a number that becomes text, and a
-- function that is made; a server that was asleep takes several times as long for all of them. So run.lua does without
-- what it can.

local KEYS, ARGV, ask = KEYS, ARGV, redis.pcall

-- The short calls are written out: with functions that run.lua and steps.lua share, the script takes an eighth longer
-- for them (docs/performance.md).

-- As in run.lua: the release of a plain lock, without a min hold, where there are no slots.
if ARGV[1] == 'release' then
  local key, grant, channel = KEYS[1], ARGV[2], ARGV[3]
  if ask('HDEL', key, grant) == 1 then
    local heard = ask('PUBLISH', channel, '0')
    return type(heard) == 'number' and 1 + heard or -1
  end
  KEYS, ARGV = { key, key }, { '0', '0', '0', '0', 'release', grant, channel }
end

local fence = KEYS[1]
-- Tokens of the acquires of one call reach back, so that they never outrun the clock: after a flush the clock alone must
-- be ahead of every token ever given. (INCRBY without the script may be ahead of it by the acquires of a few calls, until these
-- are answered.) They reach back by at most REACH, in µs: a replica that takes over knows an older
-- last token, and takes longer than that.
local REACH = 5000
-- A smaller last token is not the clock of a server (in 2001): the last one was lost, and INCRBY without the script has begun
-- anew with 0. As where there is none, nothing reaches back.
local LEAST = 1000000000000000
-- The server time in µs, and its text. Lua prints large numbers as 1.79e+15, and printing one is slow.
local now, now_text
-- Returns the error to answer the whole call with, if the time is forbidden.
local function look_at_the_clock()
  local time = ask('TIME')
  if time.err then return { err = 'NOPERM TIME: ' .. time.err } end
  local seconds, micros = time[1], time[2]
  now = seconds * 1000000 + micros
  now_text = seconds .. string.sub('000000', #micros + 1) .. micros
end
