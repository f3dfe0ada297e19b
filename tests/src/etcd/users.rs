//! Users of a server, and their rights.

use serde_json::{Value, json};

use super::{Etcd, range};

impl Etcd {
    /// Adds a user with a role of the same name, which may read and write all keys that begin so.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn add_user(&self, user: &str, password: &str, prefix: Option<&str>) {
        self.asked("auth/user/add", json!({"name": user, "password": password}))
            .await;
        self.asked("auth/role/add", json!({"name": user})).await;
        if let Some(prefix) = prefix {
            let mut rights = range(prefix);
            rights["permType"] = "READWRITE".into();
            self.asked("auth/role/grant", json!({"name": user, "perm": rights}))
                .await;
        }
        self.grant_role(user, user).await;
    }

    /// Gives a user a role.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn grant_role(&self, user: &str, role: &str) {
        self.asked("auth/user/grant", json!({"user": user, "role": role}))
            .await;
    }

    /// Takes a role from a user.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn revoke_role(&self, user: &str, role: &str) {
        self.asked("auth/user/revoke", json!({"name": user, "role": role}))
            .await;
    }

    /// Enables authentication. From now on [`ask`](Etcd::ask) logs in as `root` with this password.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn enable_authentication(&self, root: &str) {
        self.asked("auth/enable", json!({})).await;
        *self.root.lock() = Some(root.to_owned());
    }

    async fn asked(&self, path: &str, body: Value) {
        assert!(self.ask(path, &body).await.is_some(), "{path}");
    }
}
